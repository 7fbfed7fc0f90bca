"""Transformers' families of language models, each as a configuration of a few thousand parameters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

import normforge

from .alike import move

# What configurations call their sizes; a family takes those it knows.
_SMALL: dict[str, Any] = {
    "bos_token_id": 1,
    "d_model": 32,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "decoder_layers": 2,
    "embedding_size": 32,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "encoder_layers": 2,
    "eos_token_id": 2,
    "ff_dim": 48,
    "ffn_dim": 48,
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_dim": 48,
    "intermediate_size": 48,
    "kv_lora_rank": 16,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 16,
    "moe_num_experts": 4,
    "n_embd": 32,
    "n_group": 1,
    "n_head": 4,
    "n_heads": 4,
    "n_inner": 48,
    "n_layer": 2,
    "n_layers": 2,
    "n_positions": 64,
    "n_routed_experts": 4,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_layers": 2,
    "num_local_experts": 4,
    "pad_token_id": 0,
    "q_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "sliding_window": 16,
    "topk_group": 1,
    "use_cache": True,
    "v_head_dim": 8,
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "word_embed_proj_dim": 32,
}

_MLA = {"num_key_value_heads": 4}
_SHORT_MLA = _MLA | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "qk_head_dim": 8}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}

# Families that need nothing but small sizes.
_ALIKE = (
    "afmoe",
    "apertus",
    "arcee",
    "aria_text",
    "bart",
    "bert",
    "bert-generation",
    "big_bird",
    "bigbird_pegasus",
    "biogpt",
    "bitnet",
    "blenderbot",
    "blenderbot-small",
    "bloom",
    "camembert",
    "ctrl",
    "cwm",
    "data2vec-text",
    "diffllama",
    "doge",
    "electra",
    "ernie",
    "ernie4_5",
    "exaone4",
    "flex_olmo",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_neox_japanese",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "jetmoe",
    "lfm2",
    "llama",
    "llama4_text",
    "mamba",
    "marian",
    "mbart",
    "megatron-bert",
    "minimax",
    "minimax_m2",
    "ministral",
    "mistral",
    "mixtral",
    "modernbert-decoder",
    "moshi",
    "mpt",
    "mvp",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "olmoe",
    "openai-gpt",
    "opt",
    "pegasus",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "plbart",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
)

# Each family by its model type, with what differs from `_SMALL`; None leaves a size at the family's default.
FAMILIES: dict[str, dict[str, Any]] = {
    **{family: {} for family in _ALIKE},
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": _SHORT_MLA,
    "deepseek_v3": _MLA,
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_moe": {"moe_k": 2},
    "falcon": {"head_dim": None},
    "gemma4_text": {"head_dim": None},
    "glm4_moe_lite": _SHORT_MLA,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "longcat_flash": _MLA,
    "minicpm3": _SHORT_MLA,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
}


def tiny(family: str) -> PretrainedConfig:
    """Return the small configuration of a family.

    Raises:
        KeyError: this release of transformers has no such family.
    """
    cls = CONFIG_MAPPING[family]
    known = set(vars(cls())) | set(dir(cls))
    sizes = {name: size for name, size in _SMALL.items() if name in known} | FAMILIES[family]
    return cls(**{name: size for name, size in sizes.items() if size is not None})


def language_model(family: str, *, patched: bool = False) -> Any:
    """Return a small model of a family, always of the same random weights, in evaluation mode."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(family)).float().eval()
    move(model)
    if patched:
        normforge.patch(model)
    return model
