"""The functional API where no kernel runs: torch's own operators."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from ..codegen.model import Cast, Norm
from ..dtypes import HALVES


def normalise(
    norm: Norm,
    x: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float | None,
    out_dtype: torch.dtype | None,
    cast: Cast = Cast.AFTER_WEIGHT,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `autograd.normalise` returns of the same arguments, computed by torch."""
    to = rounded_to(cast, out_dtype or x.dtype, x.dtype)
    if to is not None:
        h, residual_out = normalise(norm, x, shape, None, None, residual, eps, to)
        return _affine(h, weight, bias).to(out_dtype or x.dtype), residual_out
    if residual is None and out_dtype is None:
        return _operator(norm, x, shape, weight, bias, eps), None
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    residual_out = None
    if residual is not None:
        # As in the kernels, the norm is of the sum before it is rounded to residual's dtype.
        total = total + residual.to(torch.promote_types(residual.dtype, torch.float32))
        residual_out = total.to(residual.dtype)
    return _operator(norm, total, shape, weight, bias, eps).to(out_dtype or x.dtype), residual_out


def rounded_to(cast: Cast, y_dtype: torch.dtype, x_dtype: torch.dtype) -> torch.dtype | None:
    """What rows are rounded to before the weight: y's dtype (or dy's) of 16 bits, or else x's; None if they are not."""
    return next((dtype for dtype in (y_dtype, x_dtype) if cast.comes_first and dtype in HALVES), None)


def _affine(h: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    given = [tensor.dtype for tensor in (h, weight, bias) if tensor is not None]
    wide = functools.reduce(torch.promote_types, given, torch.float32)
    y = h.to(wide) if weight is None else h.to(wide) * weight.to(wide)
    return y if bias is None else y + bias.to(wide)


def _operator(
    norm: Norm,
    x: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float | None,
) -> torch.Tensor:
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if len(dtypes) > 1:
        # Which types go together depends on the device and on the transform, and the kernels take any.
        wide = functools.reduce(torch.promote_types, dtypes, torch.float32)
        weight, bias = (None if parameter is None else parameter.to(wide) for parameter in (weight, bias))
        return _operator(norm, x.to(wide), shape, weight, bias, eps).to(x.dtype)
    if not norm.centres:
        return functional.rms_norm(x, list(shape), weight, eps)
    assert eps is not None
    return functional.layer_norm(x, list(shape), weight, bias, eps)


def gradients(
    dy: torch.Tensor,
    dresidual_out: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    cast: Cast = Cast.AFTER_WEIGHT,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `gradients.backward` computes, by torch and not yet rounded to any type: dx, dweight and dbias.

    Arguments are as there; mean is None for RMSNorm.
    """
    rstd = rstd.view(*x.shape[:-1], 1)
    h = x.float() * rstd if mean is None else (x.float() - mean.view(rstd.shape)) * rstd
    to = rounded_to(cast, dy.dtype, x.dtype)
    weighted = h if to is None else h.to(to).float()
    dy = dy.float()
    g = dy if weight is None else dy * weight.float()
    dx = g - h * (g * h).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * rstd
    if dresidual_out is not None:
        dx = dx + dresidual_out.float()
    leading = tuple(range(x.dim() - 1))
    return dx, (dy * weighted).sum(leading) if leading else dy * weighted, dy.sum(leading) if leading else dy
