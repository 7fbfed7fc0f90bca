"""Models whose blocks add and normalise as those of model libraries do: the shapes of their forwards, small."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .models import WIDTH, Block, GemmaRMSNorm, LlamaRMSNorm, Make

VOCABULARY = 17


class Attention(torch.nn.Module):
    """Causal attention, which returns its weights too, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(hidden_states).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * 8**-0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        h = (weights.to(v.dtype) @ v).transpose(1, 2).flatten(2)
        return self.out(h), weights if kwargs.get("output_attentions") else None


class MLP(torch.nn.Sequential):
    """A GELU between two linear layers."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(WIDTH, 48), torch.nn.GELU(), torch.nn.Linear(48, WIDTH))


class CheckpointingLayer(torch.nn.Module):
    """Wraps the forward of each class derived from it, so that it can be run under checkpoint."""

    gradient_checkpointing = False
    use_reentrant = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward = cls.forward

        @functools.wraps(forward)
        def forward_with_checkpointing(self: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = type(self).forward is forward_with_checkpointing
            if self.gradient_checkpointing and self.training and outermost:
                run = functools.partial(forward, self, **kwargs)
                return checkpoint(run, *args, use_reentrant=self.use_reentrant)
            return forward(self, *args, **kwargs)

        cls.forward = forward_with_checkpointing


def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as libraries have them, for arguments that had another name once."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class LlamaLayer(CheckpointingLayer):
    """Pre-norm; each sum is named twice."""

    def __init__(self, norm: Make = LlamaRMSNorm, p: float = 0.0) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = MLP()
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.dropout = torch.nn.Dropout(p)

    @renamed
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        hidden_states = residual + self.dropout(hidden_states)
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + functional.dropout(hidden_states, self.dropout.p, self.training)


class GPT2Layer(torch.nn.Module):
    """The residual behind the plus, a branch that is seldom taken, and a tuple returned that is made by adding."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = torch.nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln_cross = torch.nn.LayerNorm(WIDTH)
        self.cross = torch.nn.Linear(WIDTH, WIDTH)
        self.ln_2 = torch.nn.LayerNorm(WIDTH)
        self.mlp = MLP()

    def forward(
        self, hidden_states: torch.Tensor, encoded: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        residual = hidden_states
        outputs = self.attn(self.ln_1(hidden_states), **kwargs)
        hidden_states = outputs[0] + residual
        if encoded is not None:
            residual = hidden_states
            hidden_states = residual + self.cross(self.ln_cross(hidden_states) + encoded)
        residual = hidden_states
        hidden_states = residual + self.mlp(self.ln_2(hidden_states))
        returned: tuple[torch.Tensor, ...] = (hidden_states,) + outputs[1:]  # noqa: RUF005  # a sum of no tensors
        return returned


class GemmaLayer(LlamaLayer):
    """Norms around attention and MLP; the results of those behind are added to the residual."""

    def __init__(self, norm: Make = GemmaRMSNorm) -> None:
        super().__init__(norm)
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.pre_feedforward_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.post_feedforward_layernorm(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states  # noqa: RET504  # as the models write it


class PostNormLayer(torch.nn.Module):
    """The sum is the norm's argument."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.dense = torch.nn.Linear(WIDTH, WIDTH)
        self.first = torch.nn.LayerNorm(WIDTH, eps=1e-12)
        self.last = torch.nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended = self.attention(hidden_states, **kwargs)[0]
        hidden_states = self.first(attended + hidden_states)
        normed: torch.Tensor = self.last(self.dense(functional.gelu(hidden_states)) + hidden_states)
        return normed


class Decoder(torch.nn.Module):
    """An embedding, two layers, a last norm and a head."""

    def __init__(self, layer: Make, norm: Make) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList([layer() for _ in range(2)])
        self.norm = norm()
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, hidden: list[torch.Tensor] | None = None, **kwargs: Any) -> torch.Tensor:
        """Logits; the hidden states before each layer, and behind the last, are added to a list."""
        x = self.embedding(tokens)
        for layer in self.layers:
            if hidden is not None:
                hidden.append(x)
            x = layer(x, **kwargs)
            x = x[0] if isinstance(x, tuple) else x
        if hidden is not None:
            hidden.append(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def layer_norm(bias: bool = True) -> torch.nn.Module:
    return torch.nn.LayerNorm(WIDTH, bias=bias)


# Per family: how to make a model, the names of the norms that its blocks call directly behind a sum, and of those whose
# input they add again.
FAMILIES: dict[str, tuple[Make, tuple[str, ...], tuple[str, ...]]] = {
    "Llama": (
        lambda: Decoder(LlamaLayer, LlamaRMSNorm),
        ("post_attention_layernorm",),
        ("input_layernorm", "post_attention_layernorm"),
    ),
    "Gemma2": (
        lambda: Decoder(GemmaLayer, GemmaRMSNorm),
        ("pre_feedforward_layernorm",),
        ("input_layernorm", "pre_feedforward_layernorm"),
    ),
    "GPT2": (lambda: Decoder(GPT2Layer, layer_norm), ("ln_2",), ("ln_1", "ln_cross", "ln_2")),
    # Attention is torch's own.
    "torch": (lambda: Decoder(Block, lambda: layer_norm(bias=False)), ("second",), ("first",)),
    "post_norm": (lambda: Decoder(PostNormLayer, torch.nn.Identity), ("first", "last"), ()),
}


def made(family: str, device: str = "cpu") -> Any:
    """A model with weights that do something."""
    torch.manual_seed(0)
    model = FAMILIES[family][0]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3)
    return model.to(device)
