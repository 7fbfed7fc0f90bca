"""The forward functions: the names and meanings of ck_tile's `layernorm2d_fwd`, on torch tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..codegen.model import FusedAdd, FusedQuant, Norm, Rounding
from ..mode_words import word
from ..selection import dispatch
from .arguments import prepare, refuse_gradient
from .backend import backend
from .forward import forward_fused, forward_plain
from .operands import ZERO, Foreign
from .outputs import LayerNormOutput
from .traced import dispatch_modes, forward_traced, is_dynamo_compiling

# The defaults of `fadd` and `fquant`, and of `rounding`. A caller's own words are mostly these very objects; where they
# are not, the call takes the longer way.
_NONE, _NEAREST = "none", "nearest"


def layernorm2d_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    fadd: str | int | FusedAdd = "none",
    smooth_scale: torch.Tensor | None = None,
    fquant: str | int | FusedQuant = "none",
    x_bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype = torch.float32,
    save_mv: bool = False,
    rounding: str | Rounding = "nearest",
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> LayerNormOutput:
    """LayerNorm over the last dimension, with what may be fused before and after it.

    With s = x + x_bias + residual in fp32: y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, with the biased
    variance (Ba et al., 2016). Quantised, y is multiplied by smooth_scale, then each row is divided by
    y_scale = max|y| / qmax, rounded and saturated; qmax is 127 for int8, 448 for float8_e4m3fn, 240 for
    float8_e4m3fnuz and 57344 for float8_e5m2. A scale that fp16 holds as a subnormal is rounded up, so that nothing
    is cut off. A row that leaves no normal fp32 scale, one of zeros say, gets y_scale = 1. One that holds a NaN or
    Inf, or whose scale is too large for scale_dtype, gets a y_scale that is NaN or Inf, and its quantised y means
    nothing.

    Not differentiable: no operand may require a gradient while gradients are enabled; `layer_norm`, `rms_norm`,
    `add_layer_norm` and `add_rms_norm` compute one. To autograd out and residual_out are modified in place.

    Args:
        x: (..., N), fp16, bf16 or fp32; any row stride, the last dimension contiguous, on a GPU (or anywhere under
            TRITON_INTERPRET=1). M, the number of rows, may be 0.
        weight: (N,), fp16, bf16 or fp32, or None for 1.
        bias: (N,), likewise, or None for 0.
        eps: added to the variance.
        residual: x's shape, fp16, bf16 or fp32; goes with fadd.
        fadd: "none" (0), "pre_add_store" (1: add residual, return the sum as residual_out) or "pre_add" (2: add it).
        smooth_scale: (N,), fp16, bf16 or fp32, of any sign; goes with fquant "smooth_dynamic".
        fquant: "none" (0), "smooth_dynamic" (1) or "dynamic" (2).
        x_bias: (N,), added to every row of x before anything else, or None.
        out_dtype: y's dtype; None is x's dtype, or int8 when quantised, or that of `out`.
        scale_dtype: y_scale's dtype: float32, float16 or bfloat16. y is divided by the scale as stored.
        save_mv: return mean and rstd.
        rounding: int8 only: "nearest" (even) or "truncate" (toward zero, as ck_tile does).
        out: where y goes, instead of a new tensor; may be x or residual itself if the dtype is the same.
        residual_out: where the sum goes, instead of a new tensor, in residual's dtype; may be residual or x itself.

    Returns:
        `LayerNormOutput`, with None for what was not asked.

    Raises:
        ShapeError: a tensor's shape does not fit x's.
        DTypeError: a tensor or dtype is of a type that the kernels do not take.
        DeviceError: tensors are on several devices, or on one where no kernel runs.
        LayoutError: strides that the kernels cannot walk, or an output that overlaps another tensor.
        ConflictError: an argument that the modes asked for would leave unused, or one that they lack.
        GradientError: a tensor requires a gradient, with gradients enabled; or out or residual_out is an inference
            tensor, outside torch.inference_mode.
        IllegalCombinationError: no kernel can exist for the combination asked.
        MissingInstanceError: the table lacks the instance, under NORMFORGE_ON_MISS=error.
    """
    if not (is_dynamo_compiling() or dispatch_modes()):
        try:
            if (
                residual is None
                and fquant is _NONE
                and fadd is _NONE
                and out_dtype is None
                and out is None
                and x_bias is None
                and smooth_scale is None
                and residual_out is None
                and scale_dtype is torch.float32
                and rounding is _NEAREST
                and (save_mv is False or save_mv is True)
            ):
                return forward_plain("layer", x, weight, bias, eps, ZERO, save_mv)
            return forward_fused(
                "layer",
                x,
                weight,
                bias,
                eps,
                ZERO,
                residual,
                fadd,
                smooth_scale,
                fquant,
                x_bias,
                out_dtype,
                scale_dtype,
                save_mv,
                rounding,
                out,
                residual_out,
            )
        except Foreign:
            # What no kernel takes an operator may.
            pass
    return forward_traced(
        "layer",
        x,
        weight,
        bias,
        eps,
        ZERO,
        residual,
        fadd,
        smooth_scale,
        fquant,
        x_bias,
        out_dtype,
        scale_dtype,
        save_mv,
        rounding,
        out,
        residual_out,
    )


def rmsnorm2d_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = ZERO,
    residual: torch.Tensor | None = None,
    fadd: str | int | FusedAdd = "none",
    smooth_scale: torch.Tensor | None = None,
    fquant: str | int | FusedQuant = "none",
    x_bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype = torch.float32,
    save_mv: bool = False,
    rounding: str | Rounding = "nearest",
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> LayerNormOutput:
    """RMSNorm over the last dimension, with what may be fused before and after it.

    With s = x + x_bias + residual in fp32: y = s / sqrt(mean(s**2) + eps) * (weight + weight_offset) (Zhang and
    Sennrich, 2019; Gemma stores weight - 1 and passes weight_offset=1).

    Args:
        x: see `layernorm2d_fwd`, as for every argument not listed here.
        weight: (N,), fp16, bf16 or fp32, or None for 1.
        eps: added to the mean square.
        weight_offset: added to every weight, in fp32.
        residual: see `layernorm2d_fwd`.
        fadd: see `layernorm2d_fwd`.
        smooth_scale: see `layernorm2d_fwd`.
        fquant: see `layernorm2d_fwd`.
        x_bias: see `layernorm2d_fwd`.
        out_dtype: see `layernorm2d_fwd`.
        scale_dtype: see `layernorm2d_fwd`.
        save_mv: return rstd; mean is always None.
        rounding: see `layernorm2d_fwd`.
        out: see `layernorm2d_fwd`.
        residual_out: see `layernorm2d_fwd`.

    Returns:
        `LayerNormOutput`, with None for what was not asked.

    Raises:
        NormforgeError: one of those that `layernorm2d_fwd` lists.
    """
    if not (is_dynamo_compiling() or dispatch_modes()):
        try:
            if (
                residual is None
                and fquant is _NONE
                and fadd is _NONE
                and out_dtype is None
                and out is None
                and x_bias is None
                and smooth_scale is None
                and residual_out is None
                and scale_dtype is torch.float32
                and rounding is _NEAREST
                and (save_mv is False or save_mv is True)
            ):
                return forward_plain("rms", x, weight, None, eps, weight_offset, save_mv)
            return forward_fused(
                "rms",
                x,
                weight,
                None,
                eps,
                weight_offset,
                residual,
                fadd,
                smooth_scale,
                fquant,
                x_bias,
                out_dtype,
                scale_dtype,
                save_mv,
                rounding,
                out,
                residual_out,
            )
        except Foreign:
            # What no kernel takes an operator may.
            pass
    return forward_traced(
        "rms",
        x,
        weight,
        None,
        eps,
        weight_offset,
        residual,
        fadd,
        smooth_scale,
        fquant,
        x_bias,
        out_dtype,
        scale_dtype,
        save_mv,
        rounding,
        out,
        residual_out,
    )


_FORWARD: dict[Norm, Callable[..., LayerNormOutput]] = {Norm.LAYER: layernorm2d_fwd, Norm.RMS: rmsnorm2d_fwd}


def which(*arguments: Any, norm: str | Norm = "layer", functional: bool = False, **keywords: Any) -> str:
    """Name the instance that a forward call would take, without generating or launching anything.

    Args:
        *arguments: what `layernorm2d_fwd` or `rmsnorm2d_fwd` would be given.
        norm: "layer" or "rms": which of the two.
        functional: whether the question is about `layer_norm`, `rms_norm` or a module rather than the forward
            function. Those run torch's own operator where no kernel can run, and then the answer is "torch".
        **keywords: likewise.

    Returns:
        The name that `instances()` lists, or would list once it has been generated on demand.

    Raises:
        NormforgeError: whatever the call itself would raise about its arguments.
    """
    kind = word(Norm, "norm", norm)
    bound = inspect.signature(_FORWARD[kind]).bind(*arguments, **keywords)
    bound.apply_defaults()
    call = prepare(kind, **bound.arguments)
    if not functional:
        refuse_gradient(call)
    elif backend(call.x) == "torch":
        return "torch"
    return dispatch.name_of(call.mode, call.n)
