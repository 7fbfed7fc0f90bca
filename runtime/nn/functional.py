"""Differentiable norms with the signatures of torch.nn.functional, and fused with the residual add before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from ..calls import recorded, torch_instead
from ..calls.argument_checks import check_tensor
from ..calls.backend import backend, left_to_torch
from ..calls.check import check_normalised
from ..calls.known import PLAIN
from ..calls.traced import (
    intercepted,
    is_dynamo_compiling,
    keeps_for_recomputation,
    normalise_traced,
    result_dtype,
    unrecorded,
)
from ..codegen.model import Cast, Norm
from ..codegen.parameters import FORWARD
from ..mode_words import word

# What torch.nn.functional.rms_norm adds where eps is None: it computes 16-bit inputs in fp32, as the kernels do.
DEFAULT_EPS = torch.finfo(torch.float32).eps


def layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    cast: str | Cast = "after_weight",
) -> torch.Tensor:
    """LayerNorm over x's last dimensions, as `torch.nn.functional.layer_norm`.

    y = (x - mean) / sqrt(var + eps) * weight + bias, with the biased variance (Ba et al., 2016). Differentiable once.
    For the backward pass x is kept, and a mean and rstd a row; nothing where no gradient is due.

    Where kernels cannot, torch's own operator runs, on a GPU too: in transforms of torch.func, for tensors that carry a
    tangent of forward-mode AD, for DTensors, in what torch.jit.trace records, where anything is float64 (which is
    logged once), and for rows of no elements.

    Under torch.autocast y has the dtype that torch's has: fp32 on a GPU (that of rms_norm by the release of torch),
    x's on a CPU. `backend` tells where kernels run and where torch's own operator does.

    Args:
        x: (..., *normalized_shape), fp16, bf16, fp32 or fp64; any strides. What kernels cannot walk (N not contiguous,
            leading dimensions without one common stride) is copied once.
        normalized_shape: the last dimensions of x, normalised together.
        weight: normalized_shape, fp16, bf16, fp32 or fp64, or None for 1.
        bias: likewise, or None for 0.
        eps: added to the variance.
        cast: "after_weight" (rows are rounded once, to y's dtype) or "before_weight" (rounded to it before they are
            multiplied by weight as well, as Hugging Face's Llama does; the gradient of weight is of the rounded rows).

    Returns:
        y: x's shape and dtype.

    Raises:
        ShapeError: normalized_shape is not what x's shape ends in, or is not weight's or bias's shape.
        DTypeError: x, weight or bias is of a type that cannot be normalised (an integer one, say).
        DeviceError: x, weight and bias are on several devices.
        LayoutError: a tensor is sparse or nested.
        ConflictError: eps is no number of at least 0.
        GradientError: the gradient is differentiated; raised by that backward pass.
        NormforgeError: whatever else `layernorm2d_fwd` raises.
    """
    known = None
    if not is_dynamo_compiling():
        known = recorded.normalise_known("layer", x, normalized_shape, weight, bias, None, eps, None, cast)
    if known is not None:
        return known[0]
    if _overridden(x, weight, bias):
        return handle_torch_function(layer_norm, (x, weight, bias), x, normalized_shape, weight, bias, eps, cast=cast)
    return normalise(Norm.LAYER, x, normalized_shape, weight, bias, eps=eps, cast=cast)[0]


def rms_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    cast: str | Cast = "after_weight",
) -> torch.Tensor:
    """RMSNorm over x's last dimensions, as `torch.nn.functional.rms_norm`.

    y = x / sqrt(mean(x**2) + eps) * weight (Zhang and Sennrich, 2019). Everything else is as in `layer_norm`.

    Args:
        x: see `layer_norm`, as for every argument not described here.
        normalized_shape: see `layer_norm`.
        weight: see `layer_norm`.
        eps: added to the mean square; None is torch.finfo(torch.float32).eps, also for 16-bit x: torch takes that of
            the type it computes in, as its documentation says since 2.13.
        cast: see `layer_norm`.

    Returns:
        y: x's shape and dtype.

    Raises:
        NormforgeError: one of those that `layer_norm` lists.
    """
    known = None
    if not is_dynamo_compiling():
        known = recorded.normalise_known(
            "rms", x, normalized_shape, weight, None, None, DEFAULT_EPS if eps is None else eps, None, cast
        )
    if known is not None:
        return known[0]
    if _overridden(x, weight):
        return handle_torch_function(rms_norm, (x, weight), x, normalized_shape, weight, eps, cast=cast)
    return normalise(Norm.RMS, x, normalized_shape, weight, eps=eps, cast=cast)[0]


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    cast: str | Cast = "after_weight",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a residual, and LayerNorm of the sum over its last dimension, in one kernel.

    residual_out = x + residual, and y is its LayerNorm, computed from the sum in fp32, before it is rounded to be
    stored. Differentiable once, through both outputs; residual_out is what is kept for the backward pass, with a mean
    and rstd a row.

    Args:
        x: (..., N); see `layer_norm`.
        residual: x's shape, fp16, bf16, fp32 or fp64, whatever x is.
        weight: (N,); see `layer_norm`.
        bias: (N,); see `layer_norm`.
        eps: added to the variance.
        cast: see `layer_norm`.

    Returns:
        y: x's shape and dtype (under autocast as in `layer_norm`).
        residual_out: x's shape, in residual's dtype; the residual of the next block.

    Raises:
        NormforgeError: one of those that `layer_norm` lists; also for a residual that is not of x's shape.
    """
    return add_normalise(Norm.LAYER, x, residual, None, weight, bias, eps=eps, cast=cast)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    cast: str | Cast = "after_weight",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a residual, and RMSNorm of the sum over its last dimension, in one kernel.

    Args:
        x: see `add_layer_norm`, as for every argument not described here.
        residual: see `add_layer_norm`.
        weight: see `add_layer_norm`.
        eps: added to the mean square; None as in `rms_norm`.
        cast: see `layer_norm`.

    Returns:
        y and residual_out, as `add_layer_norm` does.

    Raises:
        NormforgeError: one of those that `add_layer_norm` lists.
    """
    return add_normalise(Norm.RMS, x, residual, None, weight, eps=eps, cast=cast)


def normalise(
    norm: Norm,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    eps: float | None,
    out_dtype: torch.dtype | None = None,
    cast: str | Cast = "after_weight",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the functions above share: check the arguments, then run whichever serves x.

    Returns:
        y, in out_dtype if that is given, and residual_out where there is a residual.
    """
    order = word(Cast, "cast", cast)
    kernel = isinstance(x, torch.Tensor) and backend(x) == "kernel"
    left = left_to_torch((x, weight, bias, residual))
    with unrecorded():
        given: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "residual": residual}
        if eps is not None or norm.centres:
            given["eps"] = eps
        shape = check_normalised(FORWARD.functions[norm], given, normalized_shape, kernel=kernel and not left)
    if not kernel:
        return torch_instead.normalise(norm, x, shape, weight, bias, residual, eps, out_dtype, order)
    added = DEFAULT_EPS if eps is None else float(eps)
    if left:
        return torch_instead.normalise(
            norm, x, shape, weight, bias, residual, added, out_dtype or result_dtype(norm.value, x), order
        )
    traced = is_dynamo_compiling() or (intercepted(x, weight, bias, residual) and not keeps_for_recomputation())
    run = normalise_traced if traced else recorded.normalise
    return run(norm, x, shape, weight, bias, residual, added, out_dtype, cast)


def add_normalise(
    norm: Norm,
    x: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int] | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float | None,
    cast: str | Cast = "after_weight",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`normalise` of the sum of x and residual; a normalized_shape of None is x's last dimension."""
    if not is_dynamo_compiling() and x.__class__ in PLAIN and residual.__class__ in PLAIN:
        shape = x.shape[-1:] if normalized_shape is None else normalized_shape
        added = DEFAULT_EPS if eps is None and norm is Norm.RMS else eps
        known = recorded.normalise_known(norm.value, x, shape, weight, bias, residual, added, None, cast)
        if known is not None:
            return known  # type: ignore[return-value]  # there is a residual, and so its sum
    if _overridden(x, residual, weight, bias):
        both: tuple[torch.Tensor, torch.Tensor]
        both = _overridden_add(norm, x, residual, normalized_shape, weight, bias, eps, cast)
        return both
    for name, tensor in (("x", x), ("residual", residual)):
        check_tensor(name, tensor)
    shape = x.shape[-1:] if normalized_shape is None else normalized_shape
    y, residual_out = normalise(norm, x, shape, weight, bias, residual=residual, eps=eps, cast=cast)
    assert residual_out is not None
    return y, residual_out


def _overridden(*operands: torch.Tensor | None) -> bool:
    """Whether the class of an operand has a say in what functions do: `__torch_function__`, as torch.fx's proxies."""
    return any(operand is not None and type(operand) not in PLAIN for operand in operands) and has_torch_function(
        operands
    )


def _overridden_add(
    norm: Norm,
    x: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int] | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float | None,
    cast: str | Cast,
) -> Any:
    function: Callable[..., Any] = add_layer_norm if norm.centres else add_rms_norm
    parameters = (weight, bias) if norm.centres else (weight,)
    arguments: tuple[Any, ...] = (x, residual, *parameters, eps)
    if normalized_shape is not None:
        function, arguments = add_normalise, (norm, x, residual, normalized_shape, weight, bias)
        return handle_torch_function(function, (x, residual, weight, bias), *arguments, eps=eps, cast=cast)
    return handle_torch_function(function, (x, residual, weight, bias), *arguments, cast=cast)


def rms_norm_cast_before_weight(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor,
    eps: float | None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """RMSNorm whose rows are rounded before they are multiplied by the weight, as Hugging Face's models do.

    Args:
        x: see `rms_norm`.
        normalized_shape: likewise.
        weight: likewise.
        eps: likewise.
        out_dtype: y's, and if it has 16 bits what rows are rounded to; else they are rounded to x's. None is what a
            product of x's dtype and weight's has.
    """
    known = None
    if not is_dynamo_compiling() and x.__class__ in PLAIN:
        y_dtype = out_dtype or _product_dtype(x, weight)
        added = DEFAULT_EPS if eps is None else eps
        known = recorded.normalise_known(
            "rms", x, normalized_shape, weight, None, None, added, y_dtype, "before_weight"
        )
    if known is not None:
        return known[0]
    if _overridden(x, weight):
        return handle_torch_function(
            rms_norm_cast_before_weight, (x, weight), x, normalized_shape, weight, eps, out_dtype
        )
    y_dtype = out_dtype or _product_dtype(x, weight)
    return normalise(Norm.RMS, x, normalized_shape, weight, eps=eps, out_dtype=y_dtype, cast="before_weight")[0]


def _product_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    return x.dtype if x.dtype is weight.dtype else torch.promote_types(x.dtype, weight.dtype)
