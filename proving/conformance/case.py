"""One case of the table: a call of a public function, where its numbers come from, and how far off it may be."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum

import torch

from normforge.dtypes import DTYPES

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INT8, E4M3FN, E4M3FNUZ, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2

WORDS = {dtype: word.value for dtype, word in DTYPES.items()}

# The gradients that may arrive at a backward pass, by the output they are of.
Y, RESIDUAL_OUT = "y", "residual_out"


class Norm(Enum):
    """Which operation; its value is what reports call it."""

    LAYER = "LayerNorm"
    RMS = "RMSNorm"

    @property
    def word(self) -> str:
        """The norm in names of functions, and in the table of families."""
        return self.name.lower()


@dataclass(frozen=True)
class Draw:
    """The source of the values of one tensor.

    Attributes:
        kind: "normal", or "uniform" between centre - spread and centre + spread.
        centre: the mean.
        spread: the standard deviation, or half the width.
        slope: added to the centre from one row to the next.
        over_2n: whether spread is divided by twice the row's length.
    """

    kind: str
    centre: float = 0.0
    spread: float = 1.0
    slope: float = 0.0
    over_2n: bool = False


NORMAL = Draw("normal")


@dataclass(frozen=True)
class Inputs:
    """A suite's way of drawing inputs; what is not said is standard normal."""

    name: str
    x: Draw = NORMAL
    residual: Draw = NORMAL
    weight: Draw = NORMAL
    bias: Draw = NORMAL
    x_bias: Draw = NORMAL
    smooth_scale: Draw = NORMAL
    dy: Draw = NORMAL
    dresidual_out: Draw = NORMAL
    gate: Draw = NORMAL


@dataclass(frozen=True)
class Close:
    """|actual - expected| <= atol + rtol |expected|."""

    atol: float
    rtol: float = 0.0


@dataclass(frozen=True)
class Tolerance:
    """The tolerance of a suite.

    Quantised y may always be off by one step, int8 in at most 0.1 % of elements, and residual_out by nothing.

    Attributes:
        y: y that is not quantised.
        dx: gradients of x and residual.
        parameters: gradients of weight and bias.
        statistics: mean and rstd.
        y_scale: the scale of a quantised row.
    """

    y: Close
    dx: Close = Close(0.0)
    parameters: Close = Close(0.0)
    statistics: Close = Close(6e-4)
    y_scale: Close = Close(0.0, 1e-5)


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        suite: whose case this is.
        norm: which operation.
        shape: x's, (..., N).
        x: x's dtype.
        inputs: where values come from.
        tolerance: how far off outputs may be.
        weight: its dtype, as for the tensors below; None is a call without.
        bias: its dtype, or None.
        residual: its dtype, or None; goes with fadd.
        x_bias: its dtype, or None.
        smooth_scale: its dtype, or None; goes with fquant "smooth_dynamic".
        out: y's dtype; None is x's.
        scale: y_scale's dtype.
        fadd: as the public functions take it.
        fquant: as the public functions take it.
        rounding: as the public functions take it.
        save_mv: as the public functions take it.
        eps: as the public functions take it.
        weight_offset: as the public functions take it.
        cast: as the public functions take it.
        row_stride: elements from row to row of x, residual and dy; None is N.
        offset: elements before the first row in memory.
        arriving: the outputs of which a gradient arrives; none is a forward call.
        dy: the dtype of y's gradient; None is y's.
        gate: the dtype of what rows are gated by; None is a norm without.
        activation: what becomes of the gate, or with `groups` of y.
        gate_first: whether rows are gated before they are normalised.
        dropout_p: how likely elements of x are dropped before residual is added.
        channels_per_group: of GroupNorm, whose shape is (samples, groups, n); 0 is another norm.
        channels_last: of GroupNorm, whether channels are innermost in memory.
    """

    suite: str
    norm: Norm
    shape: tuple[int, ...]
    x: torch.dtype
    inputs: Inputs
    tolerance: Tolerance
    weight: torch.dtype | None = None
    bias: torch.dtype | None = None
    residual: torch.dtype | None = None
    x_bias: torch.dtype | None = None
    smooth_scale: torch.dtype | None = None
    out: torch.dtype | None = None
    scale: torch.dtype = FP32
    fadd: str = "none"
    fquant: str = "none"
    rounding: str = "nearest"
    save_mv: bool = False
    eps: float = 1e-5
    weight_offset: float = 0.0
    cast: str = "after_weight"
    row_stride: int | None = None
    offset: int = 0
    arriving: tuple[str, ...] = ()
    dy: torch.dtype | None = None
    gate: torch.dtype | None = None
    activation: str = "none"
    gate_first: bool = False
    dropout_p: float = 0.0
    channels_per_group: int = 0
    channels_last: bool = False

    @property
    def groups(self) -> int:
        """The number of channels per sample of GroupNorm; 0 for other norms."""
        return self.shape[1] if self.channels_per_group else 0

    @property
    def channels(self) -> int:
        """The number of channels of x of GroupNorm; 0 for other norms."""
        return self.groups * self.channels_per_group

    @property
    def is_beside(self) -> bool:
        """Return True if the case is GroupNorm, or has a gate or a dropout."""
        return bool(self.channels_per_group or self.gate or self.dropout_p)

    @property
    def n(self) -> int:
        """The normalised length."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """M: how many rows there are."""
        return math.prod(self.shape[:-1])

    @property
    def y(self) -> torch.dtype:
        """The dtype of y."""
        return self.out or self.x

    @property
    def quantises(self) -> bool:
        """Return True if y is quantised."""
        return self.fquant != "none"

    @property
    def rounds_first(self) -> torch.dtype | None:
        """The 16-bit type that rows are rounded to before the weight, if they are: y's, or else x's."""
        if self.cast == "after_weight":
            return None
        return next(dtype for dtype in (self.y, self.x) if dtype in (FP16, BF16))

    @property
    def mode(self) -> Mode:
        """The line of the report that the case counts in."""
        adds = "" if self.residual is None else f" {WORDS[self.residual]}"
        extras = [f"scale {WORDS[self.scale]}"] if self.scale is not FP32 else []
        extras += [self.rounding] if self.rounding != "nearest" else []
        gate = "gate" if self.gate is not None and not self.gate_first else "gate before"
        beside = [f"{self.activation} {gate}"] if self.gate is not None else []
        beside += ["dropout"] if self.dropout_p else []
        beside += [self.activation] if self.channels_per_group and self.activation != "none" else []
        beside += ["channels last"] if self.channels_last else []
        return Mode(
            "GroupNorm" if self.channels_per_group else self.norm.value,
            "backward" if self.arriving else "forward",
            f"{WORDS[self.x]} → {WORDS[self.y]}{'' if self.rounds_first is None else ', rounded first'}"
            + "".join(f", {word}" for word in beside),
            "-" if self.fadd == "none" else self.fadd + adds,
            "-" if not self.quantises else ", ".join([self.fquant, *extras]),
        )

    @property
    def id(self) -> str:
        """A name that no other case has: every field that is not its default."""
        parts = [self.suite, self.norm.value, "x".join(map(str, self.shape)), WORDS[self.x]]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("suite", "norm", "shape", "x", "inputs", "tolerance") or value == field.default:
                continue
            text = WORDS[value] if isinstance(value, torch.dtype) else value
            text = "+".join(value) if isinstance(value, tuple) else text
            parts.append(field.name if text is True else f"{field.name}={text}")
        if self.inputs.name != self.suite:
            parts.append(self.inputs.name)
        return "-".join(parts)

    @property
    def kernels(self) -> tuple[object, ...]:
        """Cases equal in this share most of their compiled kernels."""
        return (
            *(self.norm.value, self.n, bool(self.arriving)),
            *(str(dtype) for dtype in (self.x, self.y, self.weight, self.bias, self.residual, self.smooth_scale)),
            *(self.fadd, self.fquant, self.cast, self.save_mv, str(self.scale), self.rounding),
            *(str(self.gate), self.activation, self.gate_first, self.dropout_p, self.channels, self.channels_last),
        )


@dataclass(frozen=True, order=True)
class Mode:
    """A line of the report."""

    norm: str
    direction: str
    dtypes: str
    fadd: str
    fquant: str
