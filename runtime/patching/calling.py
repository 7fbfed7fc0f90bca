"""Norms with a forward of their own that calls torch's functions: the forward stays, and calls ours instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ..calls.backend import is_served
from ..families.group.functions import group_norm
from ..families.plain_functions import layer_norm, normalize, rms_norm
from ..families.replaced import ORIGINAL, Replacing
from .probing import check_class
from .report import LeftAloneError
from .text import calling


def _in_place(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return one of our functions that reads rows made by permuting a contiguous (B, C, ...) tensor where they are."""

    def run(rows: torch.Tensor, normalized_shape: Any, *args: Any, **named: Any) -> torch.Tensor:
        is_one = tuple(normalized_shape) == rows.shape[-1:]
        if is_one and rows.dim() > 2 and rows.stride(-1) != 1 and rows.movedim(-1, 1).is_contiguous():
            return function(rows.movedim(-1, 1), normalized_shape, *args, **named, dim=1).movedim(1, -1)
        return function(rows, normalized_shape, *args, **named)

    return run


def _normalize(x: torch.Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> torch.Tensor:
    """Divide by the L2 norm by ours, over the dimensions that kernels take."""
    if p == 2 and dim in (1, -1):
        return normalize(x, None, eps, dim=dim)
    return functional.normalize(x, p, dim, eps)


_layer_norm, _rms_norm = _in_place(layer_norm), _in_place(rms_norm)

# Ours, by torch's functions and methods.
_OURS: dict[Any, Callable[..., torch.Tensor]] = {
    functional.layer_norm: _layer_norm,
    functional.rms_norm: _rms_norm,
    functional.group_norm: group_norm,
    functional.normalize: _normalize,
    torch.nn.LayerNorm.forward: lambda m, x: _layer_norm(x, m.normalized_shape, m.weight, m.bias, m.eps),
    torch.nn.RMSNorm.forward: lambda m, x: _rms_norm(x, m.normalized_shape, m.weight, m.eps),
    torch.nn.GroupNorm.forward: lambda m, x: group_norm(x, m.num_groups, m.weight, m.bias, m.eps),
}
_NAMES = {function: "_normforge_" + function.__qualname__.replace(".", "_") for function in _OURS}
_KEYWORDS = frozenset(("normalized_shape", "num_groups", "weight", "bias", "eps", "p", "dim"))


class CallingNorm(Replacing):
    """A norm that calls normforge's functions where the forward that it had calls torch's."""

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the forward that the module had; torch's functions are called for what kernels do not take."""
        cls = self.__dict__[ORIGINAL].cls
        inputs = [each for each in (*args, *named.values()) if isinstance(each, torch.Tensor)]
        if is_dynamo_compiling() or not inputs:
            # A traced graph equals the unpatched model's.
            return cls.forward(self, *args, **named)
        before = None if is_served(tuple(inputs), getattr(self, "eps", None)) else self.forward_before(inputs[0])
        forward: Any = before or _forward(cls)
        return forward(self, *args, **named)


for _function, _name in _NAMES.items():
    setattr(CallingNorm, _name, staticmethod(_OURS[_function]))


def calls_torch(cls: Any) -> bool:
    """Return True if the forward of a class calls one of torch's functions, and can be rewritten to call ours."""
    try:
        check_class(cls)
        return _forward(cls) is not None
    except LeftAloneError:
        return False


@cache
def _forward(cls: Any) -> Callable[..., Any] | None:
    return calling(cls, _NAMES, _KEYWORDS)
