"""The functional API where no kernel runs: torch's own operators."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..codegen.values import Cast
from ..dtypes import HALVES
from ..mode_words import word
from ..random_mask import dropped
from ..selection.invariance import refuse_torch
from ..upstream.torch_dynamo import constant_in_traces
from ..upstream.torch_internals import is_forward_ad_on, jit_tracing
from .outputs import NormGradients, unpacked
from .straight import BackwardOperands, BackwardOptions, Operands, Options


class Dropout(NamedTuple):
    """How likely elements are dropped, the seed and offset that say which, and the dtype of what was."""

    p: float
    rng: torch.Tensor
    dtype: torch.dtype | None = None


def normalise(operands: Operands, shape: tuple[int, ...], options: Options, dropout: Dropout | None = None) -> Any:
    """What `recorded.normalise` returns of the same arguments, computed by torch, whose own eps stands for None.

    What is dropped is of x, behind x_bias.
    """
    x, weight, bias, residual, x_bias = operands
    norm, eps, weight_offset, out_dtype, cast = options
    to = _rounded_to(cast, out_dtype or x.dtype, x.dtype)
    if weight is not None and weight_offset:
        weight = widened(weight) + weight_offset
    if x_bias is None and residual is None and out_dtype is None and to is None:
        return _operator(norm, x, shape, weight, bias, eps)
    total = widened(x) if x_bias is None else widened(x) + widened(x_bias)
    if dropout is not None:
        total = dropped(total, dropout.p, dropout.rng)
    if residual is not None:
        total = as_stored(total + widened(residual), residual.dtype)
    if to is None:
        y = _operator(norm, total, shape, weight, bias, eps)
    else:
        y = _affine(_operator(norm, total, shape, None, None, eps).to(to), weight, bias)
    y = y.to(out_dtype or x.dtype)
    return y if residual is None else (y, total.to(residual.dtype))


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the type of arithmetic: fp32, or fp64 of fp64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def as_stored(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round a sum to the dtype it is stored in, and widen it again; autograd sees no rounding."""
    # An infinite sum less itself is NaN, and its rounding changes nothing.
    return total + (widened(total.to(dtype)) - total).detach().nan_to_num(0.0, math.inf, -math.inf)


def rounded_to(cast: Cast, y_dtype: torch.dtype, x_dtype: torch.dtype) -> torch.dtype | None:
    """What rows are rounded to before the weight: y's dtype (or dy's) of 16 bits, or else x's; None if they are not."""
    return next((dtype for dtype in (y_dtype, x_dtype) if cast.comes_first and dtype in HALVES), None)


@constant_in_traces
def _rounded_to(cast: str | Cast, y_dtype: torch.dtype, x_dtype: torch.dtype) -> torch.dtype | None:
    return rounded_to(word(Cast, "cast", cast), y_dtype, x_dtype)


def _affine(h: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    given = [tensor.dtype for tensor in (h, weight, bias) if tensor is not None]
    wide = functools.reduce(torch.promote_types, given, torch.float32)
    y = h.to(wide) if weight is None else h.to(wide) * weight.to(wide)
    return y if bias is None else y + bias.to(wide)


def _operator(
    norm: str,
    x: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float | None,
) -> torch.Tensor:
    # Sizes are tensors where torch.jit.trace records them, and none is compared.
    if x.device.type != "meta" and (jit_tracing() or 0 not in x.shape):
        refuse_torch(f"a norm of {x.dtype} on {x.device}")
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if len(dtypes) > 1:
        # Which types go together depends on the device and on the transform, and the kernels take any.
        wide = functools.reduce(torch.promote_types, dtypes, torch.float32)
        weight, bias = (None if parameter is None else parameter.to(wide) for parameter in (weight, bias))
        return _operator(norm, x.to(wide), shape, weight, bias, eps).to(x.dtype)
    if norm == "rms":
        return functional.rms_norm(x, list(shape), weight, eps)
    assert eps is not None
    if is_forward_ad_on():
        return _layer_norm_written_out(x, tuple(range(-len(shape), 0)), weight, bias, eps)
    return functional.layer_norm(x, list(shape), weight, bias, eps)


def _layer_norm_written_out(
    x: torch.Tensor, dims: tuple[int, ...], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Compute LayerNorm by operators whose tangents torch differentiates rightly.

    The second tangent of torch's own layer_norm is wrong (https://github.com/pytorch/pytorch/issues/196700).
    """
    wide = widened(x)
    centred = wide - wide.mean(dims, keepdim=True)
    h = centred * torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
    return _affine(h, weight, bias).to(x.dtype)


def gradients_of_recorded(operands: BackwardOperands, options: BackwardOptions) -> NormGradients:
    """What a backward call of the functional API returns, the means in rstd if there are any."""
    dy, x, weight, statistics, x_bias, dresidual_out = operands
    mean, rstd = unpacked(statistics, x.numel() // x.shape[-1])
    return gradients((dy, x, weight, rstd, x_bias, dresidual_out), mean, options)


def gradients(
    operands: BackwardOperands,
    mean: torch.Tensor | None,
    options: BackwardOptions,
    dropout: Dropout | None = None,
) -> NormGradients:
    """What a backward call returns of a dy, or of none where dx is all that is wanted; differentiable.

    mean is None for RMSNorm. rstd holds nothing else here.
    """
    dy, x, weight, rstd, x_bias, dresidual_out = operands
    _, weight_offset, cast, dx_dtype, bias_dtype, wants = options
    rstd = rstd.view(*x.shape[:-1], 1)
    mean = None if mean is None else mean.view(rstd.shape)
    s = x.float() if x_bias is None else x.float() + x_bias.float()
    if torch.is_grad_enabled() and s.requires_grad:
        mean, rstd = depending(s, mean, rstd)
    h = s * rstd if mean is None else (s - mean) * rstd
    dy = torch.zeros_like(x) if dy is None else dy
    to = _rounded_to(cast, dy.dtype, x.dtype)
    weighted = h if to is None else h.to(to).float()
    dy = dy.float()
    g = dy if weight is None else dy * (weight.float() + weight_offset)
    dx = through_rows(g, h, rstd, mean is not None, dresidual_out)
    ddropped = dx if dropout is None else dropped(dx, dropout.p, dropout.rng)
    # One rounding each.
    exact = (
        ("dx", dx, dx_dtype or x.dtype),
        ("dweight", dy * weighted, None if weight is None else weight.dtype),
        ("dbias", dy, bias_dtype),
        ("dx_bias", ddropped, None if x_bias is None else x_bias.dtype),
        ("ddropped", ddropped, (None if dropout is None else dropout.dtype) or x.dtype),
    )
    found = {
        name: (rows if name in ("dx", "ddropped") else over_rows(rows)).to(dtype)
        for name, rows, dtype in exact
        if name in wants
    }
    return NormGradients(*[found.get(name) for name in NormGradients._fields])


def through_rows(
    g: torch.Tensor, h: torch.Tensor, rstd: torch.Tensor, centres: bool, dresidual_out: torch.Tensor | None
) -> torch.Tensor:
    """The gradient of rows by g, that of what they are normalised to (h), and by that of the stored sum."""
    if 0 not in g.shape:
        refuse_torch(f"a norm's gradient on {g.device}")
    dx = g - h * (g * h).mean(-1, keepdim=True)
    if centres:
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * rstd
    return dx if dresidual_out is None else dx + dresidual_out.float()


def depending(
    s: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Statistics as functions of the rows, with the same values; eps is what these say it was."""
    if mean is None:
        square = s.square().mean(-1, keepdim=True)
    else:
        centre = s.mean(-1, keepdim=True)
        mean = mean + (centre - centre.detach())
        square = (s - centre).square().mean(-1, keepdim=True)
    return mean, (rstd.pow(-2) + (square - square.detach())).rsqrt()


def over_rows(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of a gradient's rows, in fp32."""
    leading = tuple(range(gradient.dim() - 1))
    return gradient.sum(leading, dtype=torch.float32) if leading else gradient.float()
