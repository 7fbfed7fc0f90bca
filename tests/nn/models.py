"""Models to patch: a block, and norms like those of Hugging Face; a model beside a patched copy."""

from __future__ import annotations

import copy
import io
import linecache
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional

import normforge

from ..calling import counted

WIDTH = 32

# What makes a model.
Make = Callable[[], torch.nn.Module]


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


class EpsRMSNorm(L2Norm):
    """Llama's formula, with an epsilon that is called `eps` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * super().forward(x)


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


Tensors = dict[str, torch.Tensor]


class Asked(torch.Tensor):
    """A tensor that writes down which functions it is asked about."""

    functions: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.functions.append(function)
        inherited: Any = super().__torch_function__
        return inherited(function, types, args, kwargs or {})


def twins(model: Any) -> tuple[Any, Any]:
    """Return a model and a patched copy of it."""
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    return model, patched


def copies(module: Any) -> tuple[Any, Any]:
    """Return a copy of a module, and what torch loads of the module that it saved."""
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return copy.deepcopy(module), torch.load(buffer, weights_only=False)


def results(module: torch.nn.Module, x: torch.Tensor, *beside: torch.Tensor | None) -> tuple[torch.Tensor, Tensors]:
    """Return what a module makes of x, and the gradients by one that arrives, the same for all modules.

    The gradients are those of x, of other operands that require one and of parameters; of what is not used, zeros.
    """
    leaf = x.detach().clone().requires_grad_()
    others = {str(at): each for at, each in enumerate(beside) if each is not None and each.requires_grad}
    leaves = {"x": leaf, **others, **dict(module.named_parameters())}
    y = module(leaf, *beside)
    arriving = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    gradients = torch.autograd.grad(y, [*leaves.values()], arriving, materialize_grads=True)
    return y.detach(), dict(zip(leaves, gradients, strict=True))


def assert_near(actual: Tensors, wanted: Tensors, tolerance: float, least: float) -> None:
    """Fail unless tensors differ by no more than a tolerance of their own size, or of `least` where that is more."""
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        size = max(tensor.abs().max().item(), least)
        torch.testing.assert_close(actual[name].double(), tensor.double(), rtol=0, atol=tolerance * size, msg=name)


def assert_same_results(
    patched: torch.nn.Module, model: torch.nn.Module, *given: Any, tolerance: float = 2e-5, least: float = 1.0
) -> None:
    """Fail unless a patched model makes of tensors what the model makes of them, and gradients are the same."""
    (y, found), (wanted, exact) = (results(each, *given) for each in (patched, model))
    assert y.dtype == wanted.dtype
    assert_near({"y": y, **found}, {"y": wanted, **exact}, tolerance, least)


def noted(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, Any]]:
    """Return a list to which a function of a module or a class adds the arguments and the result of each call."""
    calls: list[tuple[Any, Any]] = []
    function = getattr(owner, name)

    def note(*given: Any, **named: Any) -> Any:
        calls.append((given, function(*given, **named)))
        return calls[-1][1]

    patch.setattr(owner, name, note)
    return calls


class Counted:
    """How often functions made something: each a module or a class and its attribute, by a name of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **functions: tuple[Any, str]) -> None:
        self._words = counted(monkeypatch, *((*function, name) for name, function in functions.items()))

    def counts(self) -> dict[str, int]:
        """Return the counts since this was called last, of what was made at all."""
        found = dict(Counter(self._words))
        self._words.clear()
        return found
