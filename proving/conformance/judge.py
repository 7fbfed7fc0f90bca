"""How far results are off, in units of what is allowed: at most 1 passes. Sums and maxima, so that blocks of rows do.

What fp32 arithmetic and one rounding explain is what `normforge run` holds results to, whichever suite a case is of.
Nothing here waits for a GPU before a case is over; then the units of all its results are read at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import add
from typing import NamedTuple

import torch

from normforge.codegen.values import Rounding
from normforge.dtypes import DTYPES
from normforge.reference.norms import quantise
from normforge.tools import compare
from normforge.tools.compare import QUANTISATION_SLACK, SUM_ERROR, _steps
from normforge.tools.compare import Tolerance as Close

from ..cases import Tensors
from .calls import LEAVES
from .case import BF16, FP16, FP32, Case, Y
from .expected import PER_ROW, SUMMED, Want, blocks, expected, rows_of

# int8 values that may be off at all; one may in a tensor too small for the share to be one. What lies within so much of
# qmax of the edge between two is not counted: products of 16-bit values lie right there (0.6 % of one row looked
# at) where the row's largest is a multiple of 127, and then any rounding before decides.
SHARE = 1e-3
TIE = 5e-7


class Finding(NamedTuple):
    """One output's largest error: in units of what the suite allows, and of what fp32 arithmetic and rounding explain.

    Attributes:
        output: its name.
        units: at most 1 passes.
        own: at most 1 passes.
    """

    output: str
    units: float
    own: float

    @property
    def ok(self) -> bool:
        """Return True if both rules hold."""
        return self.units <= 1 and self.own <= 1


class CloseTally:
    """The error of one result, block by block of rows, held to `Close` element by element.

    A result that is infinite or NaN passes only where the expected one is the same.
    """

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
        """Return the largest error over what is allowed of it, a number on the output's device."""
        return self._worst


class QuantisedTally:
    """The error of a quantised y: one step at most, where rounding explains it, and of int8 in `SHARE` of y at most."""

    def __init__(self, dtype: torch.dtype, rounding: str, device: torch.device) -> None:
        self._dtype, self._rounding = DTYPES[dtype], Rounding(rounding)
        self._worst = torch.zeros((), dtype=torch.float64, device=device)
        self._off, self._unexplained, self._count = self._worst, self._worst, 0

    def add(self, got: torch.Tensor, want: torch.Tensor, extra: torch.Tensor | float = 0.0) -> None:
        """Count a block: the stored values, and z over the scale that was stored.

        z may be off by `extra`: of a value whose terms cancel, several of the finest steps.
        """
        if not got.numel():
            return
        slack, tie = (share * self._dtype.qmax + extra for share in (QUANTISATION_SLACK, TIE))
        low, tied_low, open_low, open_high, tied_high, high = (
            _steps(quantise(want + shift, self._dtype, self._rounding))
            for shift in (-slack, -tie, -extra, extra, tie, slack)
        )
        actual = _steps(got)
        # A step beyond what either rounding before the weight gives.
        off = (actual - torch.minimum(torch.maximum(actual, open_low), open_high)).abs()
        self._worst = torch.maximum(self._worst, off.max().double())
        self._off = self._off + ((actual < tied_low) | (actual > tied_high)).sum()
        self._unexplained = self._unexplained + ((actual < low) | (actual > high)).sum()
        self._count += got.numel()

    def units(self) -> torch.Tensor:
        """Return the largest of: steps, the share of its limit, and infinity for what rounding does not explain."""
        units = torch.where(self._unexplained > 0, torch.inf, self._worst)
        if self._dtype.is_int:
            units = torch.maximum(units, self._off / max(1.0, SHARE * self._count))
        return units


Tally = CloseTally | QuantisedTally


def judge(case: Case, given: Tensors, got: Tensors) -> list[Finding]:
    """Hold the results of a case against the expected ones, each to the suite's rule and to our own."""
    likes = _likes(case, given, got)
    missing = [name for name in {**likes, **got} if name not in got or _like(got[name]) != likes.get(name)]
    tallies = {name: _tallies(case, name, got[name]) for name in likes if name not in missing}
    if "y_scale" in missing:
        tallies.pop("y", None)
    sums: dict[str, Want] = {}
    for part in blocks(case):
        for name, want in expected(case, given, part).items():
            if name in SUMMED:
                sums[name] = Want(*map(add, want, sums[name])) if name in sums else want
            elif name in tallies:
                rows = got[name].reshape(-1) if name in PER_ROW else rows_of(got[name], case.n)
                _count(tallies[name], rows[part], _stored(case, name, want, got, part))
    for name, tally in tallies.items():
        if name in SUMMED:
            _count(tally, got[name], sums.get(name) or Want(torch.zeros_like(got[name], dtype=torch.float64)))
    units = [torch.stack([of[0].units(), of[-1].units()]) for of in tallies.values()]
    found = [
        Finding(name, *pair) for name, pair in zip(tallies, torch.stack(units).tolist() if units else (), strict=True)
    ]
    absent = [Finding(f"{name} (missing, or another shape or dtype)", math.inf, math.inf) for name in missing]
    return found + absent


Like = tuple[tuple[int, ...], torch.dtype]


def _like(tensor: torch.Tensor) -> Like:
    return tuple(tensor.shape), tensor.dtype


def _likes(case: Case, given: Tensors, got: Tensors) -> dict[str, Like]:
    """Return the shape and the dtype of every result."""
    likes: dict[str, Like] = {"y": (case.shape, case.y)}
    if case.residual is not None and case.fadd in ("pre_add_store", "post_add_norm"):
        likes["residual_out"] = (case.shape, case.residual)
    if case.dropout_p:
        likes["keep"] = (case.shape, torch.bool)
    if case.quantises:
        likes["y_scale"] = (case.shape[:-1], case.scale)
    if case.save_mv:
        names = ("mean", "rstd") if case.norm.centres else ("rstd",)
        likes |= dict.fromkeys(names, (case.shape[:-1], torch.float32))
    for name in LEAVES if case.arriving else ():
        # Without a gradient of y, those of weight and bias are zero, and may be left out.
        if name in given and (Y in case.arriving or name in ("x", "residual") or f"d{name}" in got):
            likes[f"d{name}"] = _like(given[name])
    return likes


def _tallies(case: Case, name: str, got: torch.Tensor) -> list[Tally]:
    """Return the tally of the suite's tolerance and of our own, or one for both."""
    if name == "y" and case.quantises:
        return [QuantisedTally(case.y, case.rounding, got.device)]
    tolerance = TOLERANCES[case.tolerance](case)
    # A scale of 16 bits may be one unit in the last place off.
    y_scale = Close(0.0, max(tolerance.y_scale, torch.finfo(case.scale).eps))
    rules = {"y": tolerance.y, "mean": QUACK_STATISTICS, "rstd": QUACK_STATISTICS, "y_scale": y_scale}
    rules |= {"residual_out": tolerance.y} if case.family == "renormed" else {}
    rules |= dict.fromkeys(SUMMED, tolerance.parameters) | dict.fromkeys(("dx", "dgate", "dresidual"), tolerance.dx)
    suite = own = rules.get(name, Close(0.0, 0.0))
    if name in ("mean", "rstd"):
        own = compare.STATISTICS
    elif name == ("residual_out" if case.family == "renormed" else "y"):
        # The second of two norms reads a rounded sum, so y has the suite's rule alone.
        own = compare.TOLERANCES[got.dtype]
    elif name.startswith("d") and not case.is_beside:
        about = torch.finfo(got.dtype)
        # Half a step of the smallest numbers: fp16 has them from 6e-5 down.
        own = Close(about.smallest_normal * about.eps / 2, compare.TOLERANCES[got.dtype].rtol)
    return [CloseTally(suite, got.device), CloseTally(own, got.device)]


def _stored(case: Case, name: str, want: Want, got: Tensors, part: slice) -> Want:
    """Return a quantised y in units of the scale that was stored, and other results as they are."""
    if name != "y" or not case.quantises:
        return want
    scale = got["y_scale"].reshape(-1)[part].double().unsqueeze(-1)
    return Want(want.value / scale, want.open / scale)


def _count(tallies: list[Tally], got: torch.Tensor, want: Want) -> None:
    for tally, terms in zip(tallies, (0.0, want.terms), strict=False):
        tally.add(got, want.value.reshape(got.shape), want.open + SUM_ERROR * terms)


class Tolerance(NamedTuple):
    """The tolerance of a suite.

    Quantised y may always be off by one step, int8 in at most 0.1 % of elements, and residual_out by nothing.

    Attributes:
        y: y that is not quantised.
        dx: gradients of x and residual.
        parameters: gradients of weight and bias.
        y_scale: the scale of a quantised row, beside the scale.
    """

    y: Close
    dx: Close
    parameters: Close
    y_scale: float = 1e-5


# Of mean and rstd.
QUACK_STATISTICS = Close(6e-4, 0.0)

_QUACK_FORWARD = {BF16: 1e-2, FP16: 1e-3, FP32: 1e-4}
_QUACK_BACKWARD = {BF16: 2e-2, FP16: 5e-3, FP32: 1e-4}
_QUACK_PARAMETERS = {BF16: 1e-3, FP16: 1e-3, FP32: 5e-6}


def _coarsest(*dtypes: torch.dtype | None) -> torch.dtype:
    return next(dtype for dtype in (BF16, FP16, FP32) if dtype in dtypes)


def _quack(case: Case) -> Tolerance:
    """Return the bound of weight's gradient: a sum over rows is off by about √M as much as one row's."""
    dtype, weight = case.x, case.weight or FP32
    if case.cast == "before_weight":
        # Gradients are held to what the coarsest of these types allows.
        dtype = case.y if case.y in _QUACK_FORWARD and not case.arriving else _coarsest(case.x, case.weight)
    rows = case.shape[0] * case.n if case.channels_per_group else case.rows
    forward, backward = _QUACK_FORWARD[dtype], _QUACK_BACKWARD[dtype]
    # Its weights are fp32, so that nothing but the sum is rounded.
    rounding = 1e-5 if dtype is FP32 else 1e-3 if weight is FP32 else _QUACK_FORWARD[weight]
    each = _QUACK_PARAMETERS[dtype]
    if case.family == "renormed":
        # The second norm reads a rounded sum, and the first a rounded gradient of it.
        forward, each, rounding = 2 * forward, backward, backward
    parameters = Close(each * math.sqrt(rows), rounding)
    return Tolerance(Close(forward, forward), Close(backward, backward), parameters)


def _all(atol: float, rtol: float) -> Tolerance:
    return Tolerance(*(Close(atol, rtol),) * 3)


def _flash_attention(case: Case) -> Tolerance:
    """Return less than twice the error of torch's operator and an atol, the suite's rule: the atol and one rounding."""
    coarsest = _coarsest(case.x, case.residual, case.weight)
    return _all({BF16: 5e-2, FP16: 1e-2, FP32: 1e-4}[coarsest], torch.finfo(coarsest).eps / 2)


# By the names of `suites.yaml`.
TOLERANCES: Mapping[str, Callable[[Case], Tolerance]] = {
    "ck_tile": lambda case: _all(1e-2, 0.0),
    "tutorial": lambda case: _all(1e-2, 0.0),
    "vllm": lambda case: _all(1e-2, 1e-2),
    # vLLM compares scales of its fused quantisation to 1e-6.
    "vllm_quant": lambda case: _all(1e-2, 1e-2)._replace(y_scale=1e-6),
    "quack": _quack,
    # Liger's own 1e-5 for fp32; what Liger does not test in 16 bits is held to QuACK's.
    "liger": lambda case: _all(1e-5, 1e-5) if case.x is FP32 else _quack(case),
    "flash_attention": _flash_attention,
    # 1e-3 in fp16; of bf16 a rounding alone is up to 4e-3 of the value.
    "flashinfer": lambda case: _all(1e-3, 1e-3) if case.x is FP16 else _all(1e-2, 1e-2),
}
