"""The norms that `patch` puts behind fused adds: ours, which take what was computed ahead of their call.

They name the class whose forward they call: of `super()` compiled code asks again in each call, for each norm.
"""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from ..calls.straight import DEFAULT_EPS, Options
from ..calls.traced import result_dtype
from ..dtypes import HALVES
from .huggingface import HuggingFaceRMSNorm, T5RMSNorm
from .modules import LayerNorm, RMSNorm
from .replaced import class_of
from .sums import Following, taken, waiting_sums


class FollowingLayerNorm(LayerNorm, Following):
    """`LayerNorm` behind a fused add."""

    reads = ("weight", "bias")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise input: (..., N), fp16, bf16 or fp32; returns its shape and dtype."""
        y = taken(self, input) if not is_dynamo_compiling() and waiting_sums else None
        return LayerNorm.forward(self, input) if y is None else y

    def options_for(self, total: torch.dtype, on: torch.Tensor) -> Options:
        """What it would compute of a sum of a dtype, where a tensor lies."""
        return ("layer", self.eps, 0.0, result_dtype("layer", on) or total, self.cast if total in HALVES else _AFTER)


class FollowingRMSNorm(RMSNorm, Following):
    """`RMSNorm` behind a fused add."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x: (..., N), fp16, bf16 or fp32; returns its shape."""
        y = taken(self, x) if not is_dynamo_compiling() and waiting_sums else None
        return RMSNorm.forward(self, x) if y is None else y

    def options_for(self, total: torch.dtype, on: torch.Tensor) -> Options:
        """What it would compute of a sum of a dtype, where a tensor lies."""
        return _options(self, total, on)


class FollowingHuggingFaceRMSNorm(HuggingFaceRMSNorm, Following):
    """`HuggingFaceRMSNorm` behind a fused add."""

    def forward(self, x: torch.Tensor | None = None, **named: torch.Tensor) -> torch.Tensor:
        """Normalise x: (..., N), fp16, bf16 or fp32; returns its shape.

        Raises:
            TypeError: there is not one input, or it has another name than input_name.
        """
        y = None
        if not is_dynamo_compiling() and waiting_sums and len(named) < 2:
            y = taken(self, x if x is not None else named.get(self.input_name))
        return HuggingFaceRMSNorm.forward(self, x, **named) if y is None else y

    def options_for(self, total: torch.dtype, on: torch.Tensor) -> Options:
        """What it would compute of a sum of a dtype, where a tensor lies."""
        return _options(self, total, on)


class FollowingT5RMSNorm(FollowingHuggingFaceRMSNorm, T5RMSNorm):
    """`T5RMSNorm` behind a fused add."""

    def options_for(self, total: torch.dtype, on: torch.Tensor) -> Options:
        """What it would compute of a sum of a dtype, where a tensor lies."""
        rounds = self.cast_before_weight and self.weight.dtype in HALVES
        return ("rms", self.eps, self.weight_offset, self.weight.dtype, _BEFORE if rounds else _AFTER)


_BEFORE, _AFTER = "before_weight", "after_weight"


def _options(norm: RMSNorm, total: torch.dtype, on: torch.Tensor) -> Options:
    weight: torch.Tensor | None = norm.weight
    eps = DEFAULT_EPS if norm.eps is None else norm.eps
    # What is added may have 16 bits where the sum has 32, and then nothing is rounded before the weight.
    cast = norm.cast if total in HALVES else _AFTER
    if not norm.cast_before_weight or weight is None:
        return ("rms", eps, norm.weight_offset, result_dtype("rms", on) or total, cast)
    y_dtype = total if total is weight.dtype else torch.promote_types(total, weight.dtype)
    return ("rms", eps, norm.weight_offset, y_dtype, _BEFORE if total in HALVES else _AFTER)


FOLLOWING: dict[type[torch.nn.Module], type[Following]] = {
    LayerNorm: FollowingLayerNorm,
    RMSNorm: FollowingRMSNorm,
    HuggingFaceRMSNorm: FollowingHuggingFaceRMSNorm,
    T5RMSNorm: FollowingT5RMSNorm,
}


def may_follow(module: torch.nn.Module) -> bool:
    """Whether a module is a norm that a sum can be computed together with."""
    known = isinstance(module, Following) or class_of(module) in FOLLOWING
    if not known or len(vars(module)["normalized_shape"]) != 1:
        return False
    # Of these the functional API makes another call.
    return not module._has_x_bias and not (isinstance(module, LayerNorm) and module.weight_offset)
