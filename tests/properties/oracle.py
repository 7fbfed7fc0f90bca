"""What every forward call computes, in fp64, and how far from it an fp32 computation may be.

Of normforge it reads how numbers are rounded to quantised types, which tests/test_reference.py holds to a list of all
values. The bounds follow from the formats, not from what kernels were seen to do:

- U is fp32's unit roundoff, and each operation is off by at most U of its result.
- A sum is off by `depth` U of what its terms add up to without their signs: the longest chain of additions that a term
  passes through. Along a row that is 48 + N / 1024: at most 32 values of a thread one after another, ten levels of a
  tree and a few to start with, and one merge a chunk, none of which is narrower than 1024 where a row has many. Down
  M rows it is M more.
- A mean is stored in fp32, so it is off by U |mean| besides, which each s - mean inherits; twice that is allowed.
- A variance inherits the square of the mean's error, since deviations add up to nothing; rstd's error is that of the
  ends of the variance's interval.
- What is stored is rounded once more: by half a unit in the last place of its type.

Errors of products are added up to first order; second-order terms are below the slack of `depth`. A row whose variance
plus eps may be zero within its bounds has no rstd to be held to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from normforge.codegen.values import Rounding
from normforge.dtypes import DTYPES
from normforge.reference.norms import quantise

U = 2.0**-24


class Bounded(NamedTuple):
    """A value in fp64 and how far from it a computed one may be, before it is rounded to its own type."""

    value: torch.Tensor
    error: torch.Tensor


@dataclass(frozen=True)
class Statistics:
    """Rows' mean, rstd and normalised values; `determined` tells the rows whose rstd has bounds."""

    mean: Bounded
    rstd: Bounded
    h: Bounded
    determined: torch.Tensor


def depth(n: int) -> float:
    """The longest chain of additions along a row of n values."""
    return 48.0 + n / 1024


def total(x: torch.Tensor, x_bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
    """What is normalised, in fp32 as it is defined, from left to right."""
    s = x.float()
    for term in (x_bias, residual):
        if term is not None:
            s = s + term.float()
    return s


def statistics(s: torch.Tensor, centres: bool, eps: float) -> Statistics:
    """Mean and rstd of rows, and their normalised values.

    Args:
        s: (M, N).
        centres: whether the mean is subtracted.
        eps: added to the variance.
    """
    s = s.double()
    chain = depth(s.shape[-1])
    mean = s.mean(-1, keepdim=True) if centres else s.new_zeros((s.shape[0], 1))
    deviation = s - mean
    spread = deviation.abs().mean(-1, keepdim=True)
    mean_error = U * (2 * mean.abs() + chain * spread) if centres else torch.zeros_like(mean)
    variance = deviation.square().mean(-1, keepdim=True)
    variance_error = U * (2 * chain * variance + eps) + mean_error.square()
    rstd = (variance + eps).rsqrt()
    lowest = variance - variance_error + eps
    rstd_error = torch.maximum(lowest.rsqrt() - rstd, rstd - (variance + variance_error + eps).rsqrt()) + 4 * U * rstd
    h = deviation * rstd
    h_error = mean_error * (rstd + rstd_error) + deviation.abs() * rstd_error + 2 * U * h.abs()
    return Statistics(Bounded(mean, mean_error), Bounded(rstd, rstd_error), Bounded(h, h_error), (lowest > 0).flatten())


def rounded_first(h: Bounded, cast: str, *dtypes: torch.dtype) -> Bounded:
    """Rows as cast "before_weight" leaves them to the weight: in the first type of 16 bits, or as they are."""
    halves = [dtype for dtype in dtypes if dtype in (torch.float16, torch.bfloat16)]
    if cast == "after_weight" or not halves:
        return h

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return values.to(halves[0]).double()

    value = rounded(h.value)
    # Upwards and downwards by the fp32 that lies between in torch, too.
    error = h.error + U * h.value.abs()
    return Bounded(value, torch.maximum(rounded(h.value + error) - value, value - rounded(h.value - error)))


def affine(
    h: Bounded, weight: torch.Tensor | None, bias: torch.Tensor | None, weight_offset: float
) -> tuple[Bounded, torch.Tensor]:
    """Return h * (weight + weight_offset) + bias, and the factor."""
    factor = h.value.new_ones(h.value.shape[-1]) if weight is None else weight.double() + weight_offset
    product = h.value * factor
    value = product if bias is None else product + bias.double()
    offset = 0.0 if weight is None else abs(weight_offset)
    error = h.error * factor.abs() + U * (4 * product.abs() + offset * h.value.abs() + value.abs())
    return Bounded(value, error), factor


def scaled(y: Bounded, smooth_scale: torch.Tensor) -> Bounded:
    """Return y * smooth_scale."""
    factor = smooth_scale.double()
    value = y.value * factor
    return Bounded(value, y.error * factor.abs() + U * value.abs())


def added(y: Bounded, residual: torch.Tensor) -> Bounded:
    """Return y + residual."""
    value = y.value + residual.double()
    return Bounded(value, y.error + U * value.abs())


def rounding(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    """What rounding to a float type may add to an error."""
    about = torch.finfo(dtype)
    # A 16-bit subnormal is rounded to a multiple of the smallest; fp32 ones a GPU may flush.
    least = about.smallest_normal if dtype is torch.float32 else about.smallest_normal * about.eps / 2
    return about.eps / 2 * value.abs() + least


def hold(name: str, got: torch.Tensor, want: Bounded, rows: torch.Tensor | None = None) -> None:
    """Hold a stored tensor, (M, N), (M,) or (N,), to a value within its bounds; `rows` selects those to look at.

    Raises:
        AssertionError: it is further off somewhere, or not finite.
    """
    value, error = want.value.reshape(got.shape), want.error.expand_as(want.value).reshape(got.shape)
    allowed = error + rounding(got.dtype, value.abs() + error)
    # What is beyond the type's largest becomes infinite, as it does in torch.
    overflown = value.to(got.dtype).isinf() & (got.double() == value.to(got.dtype).double())
    wrong = ~(overflown | ((got.double() - value).abs() <= allowed))
    if rows is not None:
        wrong &= rows.view(-1, *[1] * (got.dim() - 1))
    if wrong.any():
        at = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{name}{list(at)} of shape {tuple(got.shape)} is {float(got[at])!r}; it is to be {float(value[at])!r} "
            f"within {float(allowed[at]):.3g}, and {int(wrong.sum())} elements are off"
        )


def hold_quantised(y: torch.Tensor, y_scale: torch.Tensor, z: Bounded, rounding: Rounding, rows: torch.Tensor) -> None:
    """Hold quantised rows (M, N) and their scales (M,) to z; `rows` selects those to look at.

    Raises:
        AssertionError: a scale or a value is off.
    """
    out = DTYPES[y.dtype]
    qmax = out.qmax
    amax, error = z.value.abs().amax(-1), z.error.amax(-1)
    want = amax / qmax
    got = y_scale.double()
    about = torch.finfo(y_scale.dtype)
    allowed = error / qmax + 2 * U * want + about.eps / 2 * (want + error / qmax) + about.smallest_normal * about.eps
    # A row of zeros has the scale 1, and one that is zero within its bounds may.
    near = ((got - want).abs() <= allowed) & (amax + error > 0)
    ones = (got == 1) & (amax <= error)
    wrong = rows & ~(near | ones)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise AssertionError(
            f"y_scale[{at}] is {float(got[at])!r}; it is to be {float(want[at])!r} within {float(allowed[at]):.3g}"
        )
    scale = torch.where(rows, got, 1.0).unsqueeze(-1)
    ratio = z.value / scale
    # Of four U one is what rounding to fp8 by way of fp32 may add, as torch rounds fp64.
    slack = z.error / scale + 3 * U * ratio.abs()
    low, high = (quantise(each, out, rounding).double() for each in (ratio - slack, ratio + slack))
    values = y.double()
    wrong = rows.unsqueeze(-1) & ~((low <= values) & (values <= high))
    if wrong.any():
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"y[{row}, {column}] is {float(values[row, column])!r}; z / y_scale is {float(ratio[row, column])!r}, so "
            f"it is to be {float(low[row, column])!r} to {float(high[row, column])!r}"
        )
