"""The unit of an error, and the rule that an error is held to.

An error is counted in units in the last place (ulp) of the output's type: each value in the unit of the correct value,
or of a typical magnitude if that is larger. A value that is nearly zero because terms cancel carries the rounding
errors of these terms, whoever computes it, and its own unit would measure how nearly the terms cancelled. The typical
magnitude is, for y, the median of its row, which one massive value does not move, unlike a root mean square; for a
mean, the mean magnitude of the row; for gradients, the sum of their terms without signs. rstd and y_scale have no such
limit. An error that leaves no digit right, or a NaN in place of a number, counts as 1/eps units.

Correct rounding leaves half a unit, so the rule compares the largest errors beyond that. Ours is at most `MOST` times
torch's in every cell, and at most torch's in most cells; the same holds for the root mean square of the whole error.
Errors below a floor are equal: `_FP32_FLOOR` units beyond correct rounding in fp32, `_FLOOR_16_BITS` units of fp32
beyond correct rounding in 16 bits, and root mean squares as far above `_RMS_FLOOR`, where correct rounding leaves 0.29.
If rows are rounded before the weight, a value within `_OPEN` units of fp32 of the middle between two 16-bit values may
be either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Units that the largest error may be over half a unit, by correct rounding's count, before it is compared at all.
MOST = 4.0
_FP32_EPS = torch.finfo(torch.float32).eps
# An fp32 result takes three or four roundings of half a unit behind the statistics', and no two operators share them.
_FP32_FLOOR = 1.0
# A 16-bit result is rounded wrongly if fp32 errors carry it over a tie, and which values are that near is chance:
# errors of so many units of fp32 count alike.
_FLOOR_16_BITS = 8.0
# A row that is rounded on its way is fp32 until then, and no nearer to fp64 than any: ours are up to 12 units off, and
# torch's up to 35, where they are fp32 to the end. What lies so near to a tie may be rounded either way.
_OPEN = 16.0

_RMS_FLOOR = 0.3


@dataclass(frozen=True)
class Error:
    """The errors of one output: the largest error and the root mean square of all, in units."""

    largest: float
    rms: float


def floor_of(dtype: torch.dtype) -> float:
    """Errors beyond correct rounding that are equal if none is larger, in units of a dtype."""
    eps = torch.finfo(dtype).eps
    return _FP32_FLOOR if eps <= _FP32_EPS else _FLOOR_16_BITS * _FP32_EPS / eps


def ratio(ours: Error, theirs: Error, dtype: torch.dtype) -> float:
    """How many times theirs the larger of our two measures is, by the rule."""
    floor = floor_of(dtype)
    largest = max(ours.largest - 0.5, floor) / max(theirs.largest - 0.5, floor)
    return max(largest, max(ours.rms, _RMS_FLOOR + floor) / max(theirs.rms, _RMS_FLOOR + floor))


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """From the magnitude of fp64 values to the next one in a dtype."""
    info = torch.finfo(dtype)
    magnitude = values.abs().clamp(info.smallest_normal, info.max)
    exponent = torch.frexp(magnitude).exponent - 1
    return torch.ldexp(torch.full_like(magnitude, info.eps), exponent)


def error(actual: torch.Tensor, exact: torch.Tensor, typical: torch.Tensor) -> Error:
    """How far an output is from the fp64 result.

    Args:
        actual: in its own dtype.
        exact: fp64, of the same shape.
        typical: fp64, broadcast to that: the magnitude whose unit is the least that counts.
    """
    dtype = actual.dtype
    units = (actual.double() - exact).abs() / ulp(torch.maximum(exact.abs(), typical), dtype)
    worst = 1 / torch.finfo(dtype).eps
    # What rounds to an infinity is right if it is that.
    same = actual == exact.to(dtype)
    units = torch.where(same & exact.to(dtype).isinf(), 0.0, units).nan_to_num(worst).clamp(max=worst)
    return Error(float(units.max()), float(units.square().mean().sqrt()))


@dataclass(frozen=True)
class Exact:
    """The expected value of an output.

    Attributes:
        value: fp64.
        typical: fp64, broadcast to that: the magnitude whose unit is the least that counts.
        open: how far off an output may be because arithmetic in fp32 leaves open which way a value was rounded on its
            way to it; None where nothing is rounded on the way.
    """

    value: torch.Tensor
    typical: torch.Tensor
    open: torch.Tensor | None = None

    def error_of(self, actual: torch.Tensor) -> Error:
        """How far off an output is beyond what is open."""
        if self.open is None:
            return error(actual, self.value, self.typical)
        nearest = actual.double().clamp(self.value - self.open, self.value + self.open)
        return error(actual, nearest, self.typical)


def rounded(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 rows rounded to a 16-bit type, and by how much more where fp32 leaves open which way; both fp64."""
    apart = _OPEN * ulp(torch.maximum(rows.abs(), median(rows)), torch.float32)
    low, nearest, high = ((rows + shift * apart).to(dtype).double() for shift in (-1, 0, 1))
    return nearest, torch.maximum(high - nearest, nearest - low)


def statistics(
    rows: torch.Tensor, eps: float, *, centres: bool = True, averages: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of each row, 0 if rows are not centred, and the reciprocal standard deviation: fp64, (..., 1).

    An L2 norm's squares are added up, and not averaged.
    """
    s = rows.double()
    mean = s.mean(-1, keepdim=True) if centres else torch.zeros_like(s[..., :1])
    squares = (s - mean).square().sum(-1, keepdim=True) / (s.shape[-1] if averages else 1)
    return mean, (squares + eps).rsqrt()


def median(rows: torch.Tensor) -> torch.Tensor:
    """Return the median magnitude of each row, (..., 1)."""
    return rows.abs().median(-1, keepdim=True).values
