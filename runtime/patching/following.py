"""The norms that a sum can be computed together with, and the options of their calls."""

from __future__ import annotations

from typing import Any

import torch

from ..calls.traced import global_hooks, result_dtype
from ..dtypes import HALVES
from ..families.operands import DEFAULT_EPS, Options
from ..families.plain_modules import LayerNorm, RMSNorm
from .huggingface import ANY_LENGTH, HuggingFaceRMSNorm, T5RMSNorm

_FORWARDS = (LayerNorm.forward, RMSNorm.forward, HuggingFaceRMSNorm.forward)
_BEFORE, _AFTER = "before_weight", "after_weight"


def may_follow(module: Any) -> bool:
    """Return True if a sum can be computed together with a module, which is then a norm of ours over one dimension."""
    if getattr(type(module), "forward", None) not in _FORWARDS or "forward" in vars(module):
        return False
    norm: Any = module
    # An x_bias, and a LayerNorm's weight_offset, need a second call of the functional API.
    return not (
        len(norm.normalized_shape) != 1 or norm._has_x_bias or (isinstance(norm, LayerNorm) and norm.weight_offset)
    )


def rounds_once(norm: Any) -> bool:
    """Return True if a norm that `may_follow` knows returns x's dtype, rounded behind the weight."""
    rounds_first = not isinstance(norm, LayerNorm) and norm.cast_before_weight
    return norm.cast == _AFTER and not rounds_first and not isinstance(norm, T5RMSNorm)


def is_of_length(norm: Any, n: int) -> bool:
    """Return True if such a norm takes rows of n elements."""
    return norm.normalized_shape[0] in (ANY_LENGTH, n)


def vectors_of(norm: torch.nn.Module) -> tuple[torch.nn.Parameter | None, torch.nn.Parameter | None]:
    """Return the weight and the bias of a bare norm."""
    return norm._parameters.get("weight"), norm._parameters.get("bias")


def is_bare(module: Any) -> bool:
    """Return True if calling a module does no more than its forward, which `may_follow` knows."""
    return (
        may_follow(module)
        and 0.0 <= (module.eps or 0.0) < float("inf")
        and not (module._forward_pre_hooks or module._forward_hooks or global_hooks())
        and not (module._backward_pre_hooks or module._backward_hooks)
        # A parametrised weight is not in `_parameters`.
        and ("weight" in module._parameters or module.weight is None)
        and ("bias" in module._parameters or not isinstance(module, LayerNorm))
    )


def options_of(norm: Any, total: torch.dtype, on: torch.Tensor) -> Options:
    """Return the options of a norm's call with rows of a dtype, on the device of a tensor."""
    word, weight = "layer" if isinstance(norm, LayerNorm) else "rms", norm.weight
    rounds_first = word == "rms" and norm.cast_before_weight and weight is not None
    if isinstance(norm, T5RMSNorm):
        y_dtype = rounded = weight.dtype
    else:
        # An operand may have 16 bits while the sum has 32; rows of 32 bits are not rounded before the weight.
        rounded = total
        y_dtype = torch.promote_types(total, weight.dtype) if rounds_first else result_dtype(word, on) or total
    cast = _BEFORE if rounds_first else norm.cast
    eps = DEFAULT_EPS if norm.eps is None else float(norm.eps)
    return (word, eps, norm.weight_offset, y_dtype, cast if rounded in HALVES else _AFTER)
