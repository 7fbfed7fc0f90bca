"""Compute what every kernel of plain norms computes, in plain torch, in the dtype asked.

Formulas: LayerNorm (Ba et al., 2016, eq. 3-4, biased variance) and RMSNorm (Zhang & Sennrich, 2019, eq. 4);
quantisation scales a row by amax / qmax as ck_tile's `02_layernorm2d` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..codegen.values import Cast, DType, FusedAdd, FusedQuant, Norm, Rounding
from ..dtypes import DTYPES, TORCH_DTYPES, dequantised, word
from ..random_mask import dropout_mask, kept_factor
from .gradients import rounded_first


class ReferenceOutput(NamedTuple):
    """A `LayerNormOutput`, and what tells how far a kernel's may be from it.

    Attributes:
        z: what y was before it was quantised or rounded, in the arithmetic dtype.
        open: with cast "before_weight", how far off z may be where fp32 leaves open which way a row is rounded; else
            None.
        sums: the least and the largest that residual_out may be, where fp32 leaves that open; else None.
        terms: the sum of the magnitudes of the terms of z; None if no test needs them.
    """

    y: torch.Tensor
    residual_out: torch.Tensor | None
    y_scale: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor | None
    z: torch.Tensor
    open: torch.Tensor | None = None
    sums: tuple[torch.Tensor, torch.Tensor] | None = None
    terms: torch.Tensor | None = None


def layernorm2d_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    **options: Any,
) -> ReferenceOutput:
    """Compute what `normforge.layernorm2d_fwd` of the same arguments should return, in the dtypes it returns.

    `options` are the other arguments of that function, `dtype`, and `first_row`. The arithmetic is done in `dtype`; in
    float64, the default, its rounding errors are negligible beside a kernel's. first_row is the number of x's first
    row, of which dropouts make a difference, where x is a part of a call's.
    """
    return _forward(Norm.LAYER, x, weight, bias, eps=eps, weight_offset=0.0, **options)


def rmsnorm2d_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    norm: Norm = Norm.RMS,
    weight_offset: float = 0.0,
    **options: Any,
) -> ReferenceOutput:
    """Compute what `normforge.rmsnorm2d_fwd` of the same arguments should return; see `layernorm2d_fwd`.

    norm is another that keeps the mean: its squares of a row may be added up, as an L2 norm does; and a row whose norm
    is less than eps may be divided by eps, and its rstd be saved as -1 / eps.
    """
    return _forward(norm, x, weight, None, eps=eps, weight_offset=weight_offset, **options)


def _forward(
    norm: Norm,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    eps: float,
    weight_offset: float,
    residual: torch.Tensor | None = None,
    fadd: str | int | FusedAdd = "none",
    smooth_scale: torch.Tensor | None = None,
    fquant: str | int | FusedQuant = "none",
    x_bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_rng: torch.Tensor | None = None,
    first_row: int = 0,
    out_dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype = torch.float32,
    save_mv: bool = False,
    rounding: str | Rounding = "nearest",
    cast: str | Cast = "after_weight",
    dtype: torch.dtype = torch.float64,
) -> ReferenceOutput:
    fused, dropout = word(FusedAdd, "fadd", fadd), None
    after = residual if fused.is_after else None
    out_dtype = out_dtype or (None if after is None else after.dtype)
    if dropout_rng is not None:
        keep = dropout_mask(x.shape, dropout_p, dropout_rng, first_row=first_row)
        dropout = keep, kept_factor(dropout_p, x.device)
    s, terms, residual_out = _sum(dequantised(x, x_scale), x_bias, dropout, residual, fused, dtype)
    mean = s.mean(-1, keepdim=True) if norm.centres else None
    if mean is not None:
        s, terms = s - mean, terms + mean.abs()
    squares = s.square().sum(-1, keepdim=True)
    rstd = ((squares / s.shape[-1] if norm.averages else squares) + (0 if norm.clamps else eps)).rsqrt()
    clamped = squares.sqrt() < eps if norm.clamps else torch.zeros_like(squares, dtype=torch.bool)
    rstd = rstd.where(~clamped, torch.full_like(rstd, eps).reciprocal())
    z, either = rounded_first(s * rstd, word(Cast, "cast", cast), out_dtype or x.dtype, x.dtype)
    terms = terms * rstd
    if weight is not None:
        z, terms, either = _scaled(weight.to(dtype) + weight_offset, z, terms, either)
    if bias is not None:
        z, terms = z + bias.to(dtype), terms + bias.to(dtype).abs()
    if after is not None:
        z, terms = z + after.to(dtype), terms + after.to(dtype).abs()
    if not word(FusedQuant, "fquant", fquant).quantises:
        y, y_scale = z.to(out_dtype or x.dtype), None
    else:
        if smooth_scale is not None:
            z, terms, either = _scaled(smooth_scale.to(dtype), z, terms, either)
        y, y_scale = quantised_rows(z, out_dtype or torch.int8, scale_dtype, word(Rounding, "rounding", rounding))
    saved_mean = mean.squeeze(-1).float() if save_mv and mean is not None else None
    saved_rstd = rstd.where(~clamped, -rstd).squeeze(-1).float() if save_mv else None
    return ReferenceOutput(y, residual_out, y_scale, saved_mean, saved_rstd, z, either, terms=terms)


Oracle = Callable[..., ReferenceOutput]
# The norms that the oracles of other families compute with.
PLAIN: Mapping[Norm, Oracle] = {Norm.LAYER: layernorm2d_fwd, Norm.RMS: rmsnorm2d_fwd}


def _scaled(
    factor: torch.Tensor, z: torch.Tensor, terms: torch.Tensor, either: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows by a factor of each column, and what bounds their errors by its magnitude."""
    return z * factor, terms * factor.abs(), None if either is None else either * factor.abs()


def _sum(
    x: torch.Tensor,
    x_bias: torch.Tensor | None,
    dropout: tuple[torch.Tensor, torch.Tensor] | None,
    residual: torch.Tensor | None,
    fadd: FusedAdd,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the rows to normalise, the sums of their terms' magnitudes, and the stored rows.

    `dropout` has the elements that are kept, and the factor of these elements.
    """
    added = residual if fadd.is_before else None
    # A stored sum is defined in fp32, whatever the arithmetic here: it must match to the bit. The norm is of it.
    wide = torch.promote_types(added.dtype, torch.float32) if fadd.stores and added is not None else dtype
    total = x.to(wide)
    terms = total.abs()
    if x_bias is not None:
        total, terms = total + x_bias.to(wide), terms + x_bias.to(wide).abs()
    if dropout is not None:
        keep, factor = dropout
        total, terms = (torch.where(keep, each * factor.to(wide), 0.0) for each in (total, terms))
    if added is not None:
        total, terms = total + added.to(wide), terms + added.to(wide).abs()
    if not fadd.stores or added is None:
        return total, terms, None
    stored = total.to(added.dtype)
    return stored.to(dtype), stored.to(dtype).abs(), stored


def quantised_rows(
    z: torch.Tensor,
    out_dtype: torch.dtype,
    scale_dtype: torch.dtype = torch.float32,
    rounding: Rounding = Rounding.NEAREST,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row quantised by its largest value, and the scales that the rows are divided by."""
    out = DTYPES[out_dtype]
    y_scale = stored_scale(z.abs().amax(-1, keepdim=True), out.qmax, scale_dtype)
    return quantise(z / y_scale.to(z.dtype), out, rounding), y_scale.squeeze(-1)


def stored_scale(amax: torch.Tensor, qmax: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return scales as they are stored.

    Scales are rounded to nearest, and upwards where fp16 is subnormal, so that no value is cut. Values of zero, and
    values with a scale that fp32 cannot invert, get scale 1.

    Args:
        amax: the largest magnitudes of the values that share a scale.
        qmax: the largest value of the quantised type.
        dtype: the dtype of stored scales.
    """
    scale = amax / qmax
    if dtype is torch.float16:
        fp16 = torch.finfo(dtype)
        step = fp16.smallest_normal * fp16.eps
        scale = torch.where(scale < fp16.smallest_normal, (scale / step).ceil() * step, scale)
    scale = scale.to(dtype)
    return torch.where(scale.float() < torch.finfo(torch.float32).smallest_normal, 1.0, scale)


def quantise(ratio: torch.Tensor, out: DType, rounding: Rounding = Rounding.NEAREST) -> torch.Tensor:
    """Round z / y_scale to a quantised type, saturating.

    Args:
        ratio: any float tensor.
        out: the quantised type.
        rounding: int8 only.

    Returns:
        A tensor of ratio's shape in that type, of fp4 in bytes with a code each. NaN stays NaN in fp8 and is -qmax in
        int8.
    """
    if out.is_fp4:
        return _nearest_fp4(ratio)
    saturated = ratio.clamp(-out.qmax, out.qmax)
    if out.is_int:
        rounded = saturated.trunc() if rounding is Rounding.TRUNCATE else saturated.round()
        return rounded.nan_to_num(-out.qmax).to(torch.int8)
    return saturated.to(TORCH_DTYPES[out])


# Values of the codes of e2m1 without a sign (OCP Microscaling Formats, 2023).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _nearest_fp4(ratio: torch.Tensor) -> torch.Tensor:
    """Return the codes of the nearest values, the even code in a tie; NaN is 0."""
    codes = torch.zeros(ratio.shape, dtype=torch.uint8, device=ratio.device)
    for code, (below, above) in enumerate(pairwise(_FP4), start=1):
        middle = (below + above) / 2
        codes += (ratio.abs() > middle) if code % 2 else (ratio.abs() >= middle)
    return codes + 8 * ratio.signbit().to(torch.uint8)
