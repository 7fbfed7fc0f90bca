"""The norms that a sum can be computed together with, and the options of their calls."""

from __future__ import annotations

from typing import Any

import torch

from ..calls.public import DEFAULT_EPS, Options
from ..calls.traced import global_hooks, result_dtype
from ..dtypes import HALVES
from ..nn.modules import LayerNorm, RMSNorm
from .huggingface import HuggingFaceRMSNorm, T5RMSNorm

_FORWARDS = (LayerNorm.forward, RMSNorm.forward, HuggingFaceRMSNorm.forward)
_BEFORE, _AFTER = "before_weight", "after_weight"


def may_follow(module: torch.nn.Module) -> bool:
    """Return True if a sum can be computed together with a module, which is then a norm of ours over one dimension."""
    if type(module).forward not in _FORWARDS or len(vars(module)["normalized_shape"]) != 1:
        return False
    norm: Any = module
    # Of these the functional API makes another call.
    return not norm._has_x_bias and not (isinstance(norm, LayerNorm) and norm.weight_offset)


def is_bare(module: Any) -> bool:
    """Return True if calling a module does no more than its forward, which `may_follow` knows."""
    return (
        isinstance(module, torch.nn.Module)
        and may_follow(module)
        and not (module._forward_pre_hooks or module._forward_hooks or global_hooks())
        and not (module._backward_pre_hooks or module._backward_hooks or "forward" in vars(module))
        # A parameter that is made of others is not among them.
        and "weight" in module._parameters
        and ("bias" in module._parameters or not isinstance(module, LayerNorm))
    )


def options_of(norm: Any, total: torch.dtype, on: torch.Tensor) -> Options:
    """Return the options of a norm's call with rows of a dtype, on the device of a tensor."""
    # What is added may have 16 bits where the sum has 32, and then nothing is rounded before the weight.
    cast = norm.cast if total in HALVES else _AFTER
    if isinstance(norm, LayerNorm):
        return ("layer", float(norm.eps), 0.0, result_dtype("layer", on) or total, cast)
    if isinstance(norm, T5RMSNorm):
        rounds = norm.cast_before_weight and norm.weight.dtype in HALVES
        return ("rms", float(norm.eps), norm.weight_offset, norm.weight.dtype, _BEFORE if rounds else _AFTER)
    weight: torch.Tensor | None = norm.weight
    eps = DEFAULT_EPS if norm.eps is None else float(norm.eps)
    if not norm.cast_before_weight or weight is None:
        return ("rms", eps, norm.weight_offset, result_dtype("rms", on) or total, cast)
    y_dtype = total if total is weight.dtype else torch.promote_types(total, weight.dtype)
    return ("rms", eps, norm.weight_offset, y_dtype, _BEFORE if total in HALVES else _AFTER)
