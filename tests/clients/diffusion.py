"""diffusers' transformers, UNets and autoencoders, each small enough for Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import torch


class Model(NamedTuple):
    """A model of diffusers: its sizes, and what its forward takes; `patch` takes all of its norms."""

    sizes: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]


_IMAGE = {"sample_size": 8, "in_channels": 4, "out_channels": 4}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
_UNET = _IMAGE | {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
_CODES = {
    "block_out_channels": (8, 16),
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
}


def _latents(channels: int = 4, tokens: str = "sample", **others: Any) -> dict[str, Any]:
    return {tokens: torch.randn(1, channels, 8, 8), "timestep": torch.tensor([7])} | others


def _text(width: int = 12) -> torch.Tensor:
    return torch.randn(1, 3, width)


def _mask() -> torch.Tensor:
    return torch.ones(1, 3, dtype=torch.long)


DIFFUSION = {
    "UNet2DConditionModel": Model(
        _UNET
        | {
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 4,
        },
        lambda: _latents(encoder_hidden_states=_text(16)),
    ),
    "UNet2DModel": Model(
        _UNET
        | {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
        },
        _latents,
    ),
    "ControlNetModel": Model(
        {
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "in_channels": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 4,
            "conditioning_embedding_out_channels": (4, 8),
            "norm_num_groups": 4,
        },
        lambda: _latents(encoder_hidden_states=_text(16), controlnet_cond=torch.randn(1, 3, 16, 16)),
    ),
    "AutoencoderKL": Model(
        _CODES | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        lambda: {"sample": torch.randn(1, 3, 8, 8)},
    ),
    "AutoencoderKLCogVideoX": Model(
        _CODES
        | {
            "down_block_types": ("CogVideoXDownBlock3D",) * 2,
            "up_block_types": ("CogVideoXUpBlock3D",) * 2,
            "block_out_channels": (8, 8),
        },
        lambda: {"sample": torch.randn(1, 3, 1, 8, 8)},
    ),
    "DiTTransformer2DModel": Model(
        _IMAGE | _HEADS | {"out_channels": 8, "num_layers": 2, "num_embeds_ada_norm": 8, "norm_num_groups": 4},
        lambda: _latents(tokens="hidden_states", class_labels=torch.tensor([3])),
    ),
    "PixArtTransformer2DModel": Model(
        _IMAGE
        | _HEADS
        | {
            "out_channels": 8,
            "num_layers": 2,
            "cross_attention_dim": 16,
            "caption_channels": 12,
            "norm_num_groups": 4,
        },
        lambda: _latents(
            tokens="hidden_states",
            encoder_hidden_states=_text(),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ),
    ),
    "SD3Transformer2DModel": Model(
        _IMAGE
        | _HEADS
        | {
            "num_layers": 2,
            "joint_attention_dim": 12,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 10,
            "qk_norm": "rms_norm",
        },
        lambda: _latents(tokens="hidden_states", encoder_hidden_states=_text(), pooled_projections=torch.randn(1, 10)),
    ),
    "AuraFlowTransformer2DModel": Model(
        _IMAGE
        | _HEADS
        | {
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "caption_projection_dim": 16,
            "joint_attention_dim": 12,
            "pos_embed_max_size": 64,
        },
        lambda: _latents(tokens="hidden_states", encoder_hidden_states=_text(), timestep=torch.tensor([0.7])),
    ),
    "FluxTransformer2DModel": Model(
        {
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 12,
            "pooled_projection_dim": 10,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda: {
            "hidden_states": torch.randn(1, 16, 4),
            "encoder_hidden_states": _text(),
            "pooled_projections": torch.randn(1, 10),
            "timestep": torch.tensor([0.7]),
            "img_ids": torch.randn(16, 3),
            "txt_ids": torch.randn(3, 3),
        },
    ),
    "QwenImageTransformer2DModel": Model(
        {
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 12,
            "axes_dims_rope": (8, 4, 4),
        },
        lambda: {
            "hidden_states": torch.randn(1, 16, 16),
            "encoder_hidden_states": _text(),
            "encoder_hidden_states_mask": _mask(),
            "timestep": torch.tensor([0.7]),
            "img_shapes": [(1, 4, 4)],
        },
    ),
    "CogVideoXTransformer3DModel": Model(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 12,
            "num_layers": 1,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": 3,
        },
        lambda: {
            "hidden_states": torch.randn(1, 2, 4, 8, 8),
            "encoder_hidden_states": _text(),
            "timestep": torch.tensor([7]),
        },
    ),
    "CogView3PlusTransformer2DModel": Model(
        _IMAGE
        | _HEADS
        | {"num_layers": 1, "text_embed_dim": 12, "time_embed_dim": 8, "condition_dim": 4, "pos_embed_max_size": 8},
        lambda: _latents(
            tokens="hidden_states",
            encoder_hidden_states=_text(),
            original_size=torch.tensor([[8, 8]]),
            target_size=torch.tensor([[8, 8]]),
            crop_coords=torch.tensor([[0, 0]]),
        ),
    ),
    "HunyuanDiT2DModel": Model(
        _HEADS
        | {
            "sample_size": 8,
            "in_channels": 4,
            "patch_size": 2,
            "hidden_size": 16,
            "num_layers": 2,
            "mlp_ratio": 2.0,
            "cross_attention_dim": 12,
            "cross_attention_dim_t5": 16,
            "pooled_projection_dim": 10,
            "text_len": 3,
            "text_len_t5": 3,
        },
        lambda: _latents(
            tokens="hidden_states",
            timestep=torch.tensor([7.0]),
            encoder_hidden_states=_text(),
            text_embedding_mask=_mask().float(),
            encoder_hidden_states_t5=_text(16),
            text_embedding_mask_t5=_mask().float(),
            image_meta_size=torch.randn(1, 6),
            style=torch.tensor([0]),
            image_rotary_emb=[torch.randn(16, 8), torch.randn(16, 8)],
        ),
    ),
    "HunyuanVideoTransformer3DModel": Model(
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": 1,
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (2, 4, 4),
        },
        lambda: {
            "hidden_states": torch.randn(1, 4, 1, 4, 4),
            "timestep": torch.tensor([7]),
            "encoder_hidden_states": _text(16),
            "encoder_attention_mask": _mask(),
            "pooled_projections": torch.randn(1, 8),
            "guidance": torch.tensor([1024.0]),
        },
    ),
    "SanaTransformer2DModel": Model(
        _IMAGE
        | _HEADS
        | {
            "num_layers": 1,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 12,
            "patch_size": 2,
        },
        lambda: _latents(tokens="hidden_states", encoder_hidden_states=_text()),
    ),
    "LTXVideoTransformer3DModel": Model(
        _HEADS
        | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 16, "num_layers": 2, "caption_channels": 12},
        lambda: {
            "hidden_states": torch.randn(1, 16, 4),
            "encoder_hidden_states": _text(),
            "timestep": torch.tensor([7]),
            "encoder_attention_mask": _mask(),
            "num_frames": 1,
            "height": 4,
            "width": 4,
        },
    ),
    "WanTransformer3DModel": Model(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 12,
            "freq_dim": 16,
            "ffn_dim": 24,
            "num_layers": 1,
            "cross_attn_norm": True,
            "rope_max_seq_len": 16,
        },
        lambda: {
            "hidden_states": torch.randn(1, 4, 2, 8, 8),
            "timestep": torch.tensor([7]),
            "encoder_hidden_states": _text(),
        },
    ),
    "Lumina2Transformer2DModel": Model(
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "multiple_of": 8,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (16, 16, 16),
            "cap_feat_dim": 12,
        },
        lambda: _latents(
            tokens="hidden_states",
            encoder_hidden_states=_text(),
            encoder_attention_mask=_mask().bool(),
            timestep=torch.tensor([0.7]),
        ),
    ),
    "MochiTransformer3DModel": Model(
        _HEADS
        | {
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "max_sequence_length": 16,
        },
        lambda: {
            "hidden_states": torch.randn(1, 4, 2, 8, 8),
            "encoder_hidden_states": _text(16),
            "timestep": torch.tensor([7.0]),
            "encoder_attention_mask": _mask().bool(),
        },
    ),
    "PriorTransformer": Model(
        _HEADS | {"num_layers": 2, "embedding_dim": 8, "num_embeddings": 3, "additional_embeddings": 4},
        lambda: {
            "hidden_states": torch.randn(1, 8),
            "timestep": torch.tensor([7]),
            "proj_embedding": torch.randn(1, 8),
            "encoder_hidden_states": _text(8),
        },
    ),
}


def tiny(name: str) -> torch.nn.Module:
    """Return a model with random weights, in evaluation mode."""
    made: torch.nn.Module = getattr(diffusers, name)(**DIFFUSION[name].sizes)
    return made.eval()
