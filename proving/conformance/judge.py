"""How far outputs are off, in units of what is allowed: at most 1 passes. Sums and maxima, so that blocks of rows do.

Nothing here waits for a GPU; `Tally.units` are tensors, read all at once when a case is over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from . import oracle
from .case import Close

# A value may be off by one step where z / y_scale lies within so much of qmax of the middle between two: fp32 holds
# neither exactly.
SLACK = 1e-5
# int8 values that may be off at all; one may in a tensor too small for the share to be one. What lies within so much of
# qmax of the edge between two is not counted: products of 16-bit values lie right there (0.6 % of one row looked
# at) where the row's largest is a multiple of 127, and then any rounding before decides.
SHARE = 1e-3
TIE = 5e-7

# What is due to arithmetic in fp32 and one rounding to the output's own type, whichever suite the case is of.
OWN = {
    torch.float16: Close(2e-5, 1e-3),
    torch.bfloat16: Close(2e-5, 8e-3),
    torch.float32: Close(*oracle.FP32_ERROR),
}
OWN_STATISTICS = Close(1e-5, 1e-5)
# An fp32 sum's rounding errors, in units of what its terms add up to without their signs.
OWN_SUM = 2e-6


class Tally(ABC):
    """The error of one output, block by block of rows."""

    @abstractmethod
    def units(self) -> torch.Tensor:
        """Return the error so far in units of what is allowed, a number on the output's device."""


class CloseTally(Tally):
    """Held to `Close`, element by element; what is not finite has to be so on both sides."""

    def __init__(self, close: Close, device: torch.device) -> None:
        self._close = close
        self._worst = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, got: torch.Tensor, want: torch.Tensor, extra: torch.Tensor | float = 0.0) -> None:
        """Count a block; `extra` is allowed beside the tolerance."""
        if not got.numel():
            return
        allowed = self._close.atol + self._close.rtol * want.abs() + extra
        ratio = (got.double() - want).abs() / allowed
        # 0 / 0: nothing was allowed and nothing is off. What is NaN otherwise is wrong, unless the oracle's is too.
        same = (got.double() == want) | (got.isnan() & want.isnan())
        ratio = torch.where(same, 0.0, ratio.nan_to_num(nan=torch.inf))
        self._worst = torch.maximum(self._worst, ratio.max())

    def units(self) -> torch.Tensor:
        """Return the largest error over what is allowed of it."""
        return self._worst


class BesideTally(Tally):
    """Held to twice the largest error of another computation, plus atol: flash-attention's rule."""

    def __init__(self, atol: float, device: torch.device) -> None:
        self._atol = atol
        self._ours = torch.zeros((), dtype=torch.float64, device=device)
        self._theirs = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, got: torch.Tensor, want: torch.Tensor, theirs: torch.Tensor) -> None:
        """Count a block of ours and theirs."""
        if got.numel():
            ours = (got.double() - want).abs().nan_to_num(nan=torch.inf)
            self._ours = torch.maximum(self._ours, ours.max())
            self._theirs = torch.maximum(self._theirs, (theirs.double() - want).abs().max())

    def units(self) -> torch.Tensor:
        """Return the largest error over what theirs allows."""
        return self._ours / (2 * self._theirs + self._atol)


class ExactTally(Tally):
    """Held to the bit, -0 and NaN aside: any difference is infinitely many units."""

    def __init__(self, device: torch.device) -> None:
        self._differing = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Count a block."""
        self._differing = self._differing + (~((got == want) | (got.isnan() & want.isnan()))).sum()

    def units(self) -> torch.Tensor:
        """0 or infinity."""
        return torch.where(self._differing > 0, torch.inf, self._differing)


class QuantisedTally(Tally):
    """At most one step off, where rounding explains it, and of int8 in at most `SHARE` of the elements."""

    def __init__(self, dtype: torch.dtype, rounding: str, device: torch.device) -> None:
        self._dtype, self._rounding = dtype, rounding
        self._worst = torch.zeros((), dtype=torch.float64, device=device)
        self._off, self._unexplained, self._count = self._worst, self._worst, 0

    def add(self, got: torch.Tensor, z: torch.Tensor, y_scale: torch.Tensor, extra: torch.Tensor | float = 0.0) -> None:
        """Count a block: the stored values, and the values that they represent with the scale that was stored.

        z may be off by `extra`: of a value whose terms cancel, several of the finest steps.
        """
        if not got.numel():
            return
        # A row without a finite scale holds no values to compare.
        finite = y_scale.isfinite().unsqueeze(-1)
        ratio = torch.where(finite, z / y_scale.double().unsqueeze(-1), 0.0)
        open_steps = torch.where(finite, extra / y_scale.double().unsqueeze(-1), 0.0)
        slack = SLACK * oracle.QMAX[self._dtype] + open_steps
        tie = TIE * oracle.QMAX[self._dtype] + open_steps
        low, tied_low, open_low, best, open_high, tied_high, high = (
            steps(oracle.quantise(ratio + shift, self._dtype, self._rounding))
            for shift in (-slack, -tie, -open_steps, 0.0, open_steps, tie, slack)
        )
        actual = torch.where(finite, steps(got), best)
        # A step beyond what either rounding before the weight gives.
        off = (actual - torch.minimum(torch.maximum(actual, open_low), open_high)).abs()
        self._worst = torch.maximum(self._worst, off.max().double())
        self._off = self._off + ((actual < tied_low) | (actual > tied_high)).sum()
        self._unexplained = self._unexplained + ((actual < low) | (actual > high)).sum()
        self._count += got.numel()

    def units(self) -> torch.Tensor:
        """Return the largest of: steps, the share of its limit, and infinity for what rounding does not explain."""
        units = torch.where(self._unexplained > 0, torch.inf, self._worst)
        if self._dtype is torch.int8:
            units = torch.maximum(units, self._off / max(1.0, SHARE * self._count))
        return units


def steps(q: torch.Tensor) -> torch.Tensor:
    """Rank the values of a quantised type in ascending order: neighbours differ by 1, -0 is 0 and NaN is far."""
    if q.dtype is torch.int8:
        return q.to(torch.int32)
    code = q.view(torch.uint8).to(torch.int32)
    return torch.where(q.float().isnan(), 1 << 15, torch.where(code >= 128, 128 - code, code))
