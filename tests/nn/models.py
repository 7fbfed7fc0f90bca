"""Models to patch: a tiny transformer, and norms built like those of Hugging Face's models."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

WIDTH = 32


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """Draw a module's parameters at random."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 1.0)
    return module


class Block(torch.nn.Module):
    """A residual block with two norms of either kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.second = torch.nn.RMSNorm(WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        h = self.narrow(functional.gelu(self.wide(self.second(x))))
        return torch.add(x, h)


class Transformer(torch.nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(17, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.last = torch.nn.LayerNorm(WIDTH, bias=False)
        self.head = torch.nn.Linear(WIDTH, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.last(x))
        return logits


class _Weighted(torch.nn.Module):
    """What Hugging Face's RMSNorms have in common: a weight of one dimension, and an epsilon."""

    def __init__(self, n: int = WIDTH, eps: float = 1e-6, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(n, dtype=dtype))
        self.variance_epsilon = eps

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        h: torch.Tensor = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return h


class LlamaRMSNorm(_Weighted):
    """Rounds to the input's type, then multiplies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.factor(x).to(x.dtype)


class T5LayerNorm(_Weighted):
    """Rounds to the weight's type, then multiplies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.factor(x)
        return self.weight * (h if self.weight.dtype == torch.float32 else h.to(self.weight.dtype))


class Olmo2RMSNorm(_Weighted):
    """Multiplies, then rounds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.factor(x)).to(x.dtype)


class Qwen2RMSNorm(LlamaRMSNorm):
    """Calls its epsilon `eps`."""

    def __init__(self, n: int = WIDTH, eps: float = 1e-6) -> None:
        super().__init__(n, eps)
        self.eps = eps


class EpsRMSNorm(torch.nn.Module):
    """Llama's formula, with an epsilon that is called `eps` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * (wide.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)


class GemmaRMSNorm(_Weighted):
    """Multiplies by 1 + weight in fp32, then rounds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.factor(x) * (1.0 + self.weight.float())).to(x.dtype)


class HalfOffsetRMSNorm(_Weighted):
    """Adds something else than 1 to its weight: of the same build, and another formula."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.factor(x) * (0.5 + self.weight.float())).to(x.dtype)


class BiasedRMSNorm(LlamaRMSNorm):
    """Has a parameter that patch would drop."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(WIDTH))


def written(base: Any, name: str, signature: str, *body: str, names: dict[str, Any]) -> Any:
    """Return a class whose forward is a text, which `patch` reads as it reads a file's."""
    text = "\n    ".join((signature, *body)) + "\n"
    file = f"<{base.__module__}.{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made: dict[str, Any] = {}
    exec(compile(text, file, "exec"), names, made)
    return type(name, (base,), {**made, "__module__": base.__module__})


def norm(forward: Callable[..., Any], base: Any = _Weighted, name: str = "OwnNorm", **held: object) -> Any:
    """Return a class of norms with a forward of its own, whose modules hold some attributes besides."""

    class OwnNorm(base):  # type: ignore[misc]  # a parameter
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            for each, value in held.items():
                setattr(self, each, value)

    OwnNorm.forward, OwnNorm.__name__ = forward, name
    return OwnNorm


def reading(factor: Callable[[Any], Any], **held: Any) -> Any:
    """Return a class of RMSNorms that multiply by what a function reads of them."""
    plain = LlamaRMSNorm.forward
    return norm(lambda m, x: plain(m, x) * factor(m), LlamaRMSNorm, **held)


class RenamedLayerNorm(torch.nn.LayerNorm):
    """A subclass that calls what torch's does, as model libraries have them."""

    fast = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fast:
            return x
        return functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class WideLayerNorm(torch.nn.LayerNorm):
    """Computes in fp32 also where autocast would have it return fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = functional.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return wide.to(x.dtype)


class ScaledLayerNorm(torch.nn.LayerNorm):
    """A subclass of torch's that computes something of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class L2Norm(torch.nn.Module):
    """RMSNorm of any size, without a weight: as Llama4's, of queries and keys."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class DimlessRMSNorm(torch.nn.Module):
    """RMSNorm whose weight is None: as diffusers' `RMSNorm` with elementwise_affine=False, in LTX and Mochi."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-5
        self.elementwise_affine = False
        self.dim = torch.Size((0,))
        self.weight = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        normalised = hidden_states * torch.rsqrt(variance + self.eps)
        return normalised.to(hidden_states.dtype) if self.weight is None else normalised * self.weight


class ResidualGroups(torch.nn.Module):
    """As UNets have them: GroupNorm and SiLU in a Sequential, and once more in a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.GroupNorm(2, 8), torch.nn.SiLU(), torch.nn.Conv2d(8, 8, 1))
        self.norm = torch.nn.GroupNorm(4, 8, eps=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + functional.silu(self.norm(self.first(x)))
        return y
