"""The models: small configurations of known families with random weights, their inputs and their losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..provider import load
from .dit import DiT

# How far 1-D parameters are moved from the ones and zeros they start as, so that a norm without its weight is found.
_SPREAD = 0.2


@dataclass(frozen=True)
class Shape:
    """How large a model and its inputs are.

    Attributes:
        layers: blocks; of T5 in the encoder, and again in the decoder.
        width: of a token.
        heads: of attention, which share `width`, unless `head_dim` says how wide each is.
        inner: width within the perceptron.
        batch: sequences or images of a training step.
        tokens: of each sequence, where no image says how many.
        kv_heads: heads of keys and values; 0 is as many as heads.
        head_dim: width of a head; 0 is width over heads.
        vocabulary: of language models; classes of the one that sorts images.
        image: pixels of an image's side; patches are 16 by 16.
        sequences: sequences of a decode step, a token each.
        filled: tokens in the cache before the first decode step.
    """

    layers: int
    width: int
    heads: int
    inner: int
    batch: int
    tokens: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocabulary: int = 32000
    image: int = 224
    sequences: int = 8
    filled: int = 512


@dataclass(frozen=True)
class Decoding:
    """How a decode step is made of a model.

    Attributes:
        start: fills a fresh or used cache by a model's forward pass over a prompt.
        step: the logits of one token more for each sequence; the cache grows by it.
        written: the keys and values that the first step after `start` put into the cache, by layer. They tell of a
            norm what the logits hide: a tenth too much before a middle layer moves GPT-2's less than a nudge does.
    """

    start: Callable[[nn.Module], object]
    step: Callable[[Callable[..., Any]], torch.Tensor]
    written: Callable[[], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Spec:
    """A model.

    Attributes:
        name: what `--models` and tables call it.
        package: what has to be installed.
        full: what is measured.
        build: makes it, with random weights.
        loss: makes inputs of a shape, and of them a function from the model (or its compiled form) to its loss.
        decoding: makes the cache and inputs of a decode step, for a model; None where there is no such step.
        liger: the family in the name of Liger's own `apply_liger_kernel_to_...`; empty where it has none.
    """

    name: str
    package: str
    full: Shape
    build: Callable[[Shape], nn.Module]
    loss: Callable[[Shape, torch.device, torch.dtype], Callable[[Callable[..., Any]], torch.Tensor]]
    decoding: Callable[[Shape, nn.Module], Decoding] | None = None
    liger: str = ""

    @property
    def quick(self) -> Shape:
        """Two layers and few tokens, to try the benchmark on a GPU."""
        return replace(self.full, layers=2, batch=2, tokens=min(self.full.tokens, 256), filled=64)

    @property
    def tiny(self) -> Shape:
        """A shape that Triton's interpreter computes in seconds."""
        kv_heads = min(self.full.kv_heads, 1)
        return Shape(2, 32, 2, 64, 2, 3, kv_heads, 16, vocabulary=48, image=32, sequences=2, filled=3)


def make(spec: Spec, shape: Shape, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a model on a device, with weights drawn from a fixed seed."""
    torch.manual_seed(0)
    with torch.device(device):
        model = spec.build(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(_SPREAD * torch.randn_like(parameter))
    return model.to(device, dtype)


def _causal(config: str, model: str, options: Callable[[Shape], Mapping[str, Any]], shape: Shape) -> nn.Module:
    transformers = load("transformers")
    configured = getattr(transformers, config)(vocab_size=shape.vocabulary, **options(shape))
    made: nn.Module = getattr(transformers, model)(configured)
    # GPT-2's class says by its name no loss to transformers, whose warning of that would break a compiled graph.
    vars(made)["loss_type"] = "ForCausalLM"
    return made


def _llama_like(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "head_dim": shape.head_dim or shape.width // shape.heads,
        "max_position_embeddings": _positions(shape),
        "tie_word_embeddings": False,
        **_special(shape),
    }


def _gpt2(shape: Shape) -> dict[str, Any]:
    return {
        "n_embd": shape.width,
        "n_inner": shape.inner,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_positions": _positions(shape),
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        **_special(shape),
    }


def _bert(shape: Shape) -> nn.Module:
    transformers = load("transformers")
    config = transformers.BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=_positions(shape),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


def _t5(shape: Shape) -> nn.Module:
    transformers = load("transformers")
    config = transformers.T5Config(
        vocab_size=shape.vocabulary,
        d_model=shape.width,
        d_kv=shape.head_dim or shape.width // shape.heads,
        d_ff=shape.inner,
        num_layers=shape.layers,
        num_heads=shape.heads,
        dropout_rate=0.0,
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def _vit(shape: Shape) -> nn.Module:
    vision_transformer = load("timm.models.vision_transformer")
    model: nn.Module = vision_transformer.VisionTransformer(
        img_size=shape.image,
        num_classes=shape.vocabulary,
        embed_dim=shape.width,
        depth=shape.layers,
        num_heads=shape.heads,
        mlp_ratio=shape.inner / shape.width,
    )
    return model


def _dit(shape: Shape) -> nn.Module:
    return DiT(shape.layers, shape.width, shape.heads, shape.inner)


def _positions(shape: Shape) -> int:
    return max(shape.tokens, 2 * shape.filled)


def _special(shape: Shape) -> dict[str, int | None]:
    # Some families' own numbers lie beyond a small vocabulary.
    return {"bos_token_id": 0, "eos_token_id": shape.vocabulary - 1, "pad_token_id": None}


def _ids(shape: Shape, device: torch.device, *size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(shape.vocabulary, size, generator=generator).to(device)


def _noise(device: torch.device, dtype: torch.dtype, *size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, generator=generator).to(device, dtype)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # In fp32, as transformers computes the loss of its causal models: one in bf16 says little.
    return functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def _causal_language(
    shape: Shape, device: torch.device, _: torch.dtype
) -> Callable[[Callable[..., Any]], torch.Tensor]:
    ids = _ids(shape, device, shape.batch, shape.tokens)
    return lambda model: model(input_ids=ids, labels=ids, use_cache=False).loss


def _masked_language(
    shape: Shape, device: torch.device, _: torch.dtype
) -> Callable[[Callable[..., Any]], torch.Tensor]:
    ids, labels = _ids(shape, device, 2, shape.batch, shape.tokens)
    return lambda model: _cross_entropy(model(input_ids=ids).logits, labels)


def _translation(shape: Shape, device: torch.device, _: torch.dtype) -> Callable[[Callable[..., Any]], torch.Tensor]:
    ids, labels = _ids(shape, device, 2, shape.batch, shape.tokens)
    return lambda model: _cross_entropy(
        model(input_ids=ids, decoder_input_ids=labels, use_cache=False).logits, labels.roll(-1, dims=1)
    )


def _classes(shape: Shape, device: torch.device, dtype: torch.dtype) -> Callable[[Callable[..., Any]], torch.Tensor]:
    images = _noise(device, dtype, shape.batch, 3, shape.image, shape.image)
    labels = _ids(shape, device, shape.batch)
    return lambda model: _cross_entropy(model(images), labels)


def _denoising(shape: Shape, device: torch.device, dtype: torch.dtype) -> Callable[[Callable[..., Any]], torch.Tensor]:
    x, noise = _noise(device, dtype, 2, shape.batch, shape.tokens, shape.width)
    conditioning = _noise(device, dtype, shape.batch, shape.width)
    return lambda model: functional.mse_loss(model(x, conditioning).float(), noise.float())


def _causal_decoding(shape: Shape, model: nn.Module) -> Decoding:
    config: Any = model.config
    device = next(model.parameters()).device
    cache = load("transformers").StaticCache(config=config, max_cache_len=_positions(shape))
    prompt = _ids(shape, device, shape.sequences, shape.filled)
    token = prompt[:, :1].clone()

    def start(first: nn.Module) -> None:
        cache.reset()
        first(input_ids=prompt, past_key_values=cache, use_cache=True)

    return Decoding(
        start,
        lambda model: model(input_ids=token, past_key_values=cache, use_cache=True).logits,
        partial(_written, cache, shape.filled),
    )


def _translating(shape: Shape, model: nn.Module) -> Decoding:
    transformers = load("transformers")
    config: Any = model.config
    device = next(model.parameters()).device
    source = _ids(shape, device, shape.sequences, shape.filled)
    cache = transformers.EncoderDecoderCache(
        *(transformers.StaticCache(config=config, max_cache_len=size) for size in (_positions(shape), shape.filled))
    )
    encoder: Any = model.encoder
    encoded: list[Any] = []
    token = source[:, :1].clone()

    def start(first: nn.Module) -> None:
        cache.reset()
        encoded[:] = [encoder(input_ids=source)]
        first(encoder_outputs=encoded[0], decoder_input_ids=source, past_key_values=cache, use_cache=True)

    return Decoding(
        start,
        lambda model: (
            model(encoder_outputs=encoded[0], decoder_input_ids=token, past_key_values=cache, use_cache=True).logits
        ),
        partial(_written, cache.self_attention_cache, shape.filled),
    )


def _written(cache: Any, position: int) -> dict[str, torch.Tensor]:
    return {
        f"layer {index}'s {what}": getattr(layer, what)[:, :, position].clone()
        for index, layer in enumerate(cache.layers)
        for what in ("keys", "values")
    }


# The order is that of worth: a run that is cut short has measured the first ones.
def _language_model(
    name: str, classes: tuple[str, str], shape: Shape, options: Callable[[Shape], Mapping[str, Any]] = _llama_like
) -> Spec:
    """Return a causal model of transformers, given the names of its config and its class."""
    build = partial(_causal, *classes, options)
    return Spec(name, "transformers", shape, build, _causal_language, _causal_decoding, _LIGER.get(name, ""))


_LIGER = {"llama": "llama", "qwen3": "qwen3", "gemma": "gemma", "gemma3": "gemma3_text"}

SPECS = {
    spec.name: spec
    for spec in (
        _language_model(
            "llama",
            ("LlamaConfig", "LlamaForCausalLM"),
            Shape(8, 2048, 32, 8192, batch=4, tokens=2048, kv_heads=8),
        ),
        _language_model(
            "qwen3",
            ("Qwen3Config", "Qwen3ForCausalLM"),
            Shape(12, 1024, 16, 3072, batch=4, tokens=2048, kv_heads=8, head_dim=128),
        ),
        _language_model(
            "gemma",
            ("GemmaConfig", "GemmaForCausalLM"),
            Shape(8, 2048, 8, 16384, batch=4, tokens=2048, kv_heads=1, head_dim=256),
        ),
        _language_model(
            "gemma3",
            ("Gemma3TextConfig", "Gemma3ForCausalLM"),
            Shape(8, 2304, 8, 9216, batch=4, tokens=2048, kv_heads=4, head_dim=256),
        ),
        _language_model(
            "gpt2",
            ("GPT2Config", "GPT2LMHeadModel"),
            Shape(6, 1024, 16, 4096, batch=16, tokens=1024, vocabulary=50304),
            _gpt2,
        ),
        Spec("vit", "timm", Shape(8, 1024, 16, 4096, batch=64, vocabulary=1000), _vit, _classes),
        Spec("bert", "transformers", Shape(6, 1024, 16, 4096, batch=32, tokens=512), _bert, _masked_language),
        Spec(
            "t5",
            "transformers",
            Shape(4, 1024, 16, 4096, batch=16, tokens=512),
            _t5,
            _translation,
            _translating,
        ),
        Spec("dit", "torch", Shape(6, 1152, 16, 4608, batch=32, tokens=256), _dit, _denoising),
    )
}
