"""One case of the table: a call of a public function, where its numbers come from, and how far off it may be."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from normforge.codegen.values import Norm
from normforge.dtypes import DTYPES

from .. import cases

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

WORDS = {dtype: word.value for dtype, word in DTYPES.items()}

# The gradients that may arrive at a backward pass, by the output they are of.
Y, RESIDUAL_OUT = "y", "residual_out"


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        suite: whose case this is.
        norm: which operation.
        shape: x's, (..., N).
        x: x's dtype.
        inputs: where values come from, by a name of `suites.yaml`.
        tolerance: how far off outputs may be, by a name of `tolerances.TOLERANCES`.
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
        channels_last: of GroupNorm and of a norm over channels, whether channels are innermost in memory.
        over_channels: whether rows are the channels of (samples, n, positions); the shape is (samples, positions, n).
        next_weight: the dtype of a second norm's weight.
        next_bias: the dtype of a second norm's bias.
    """

    suite: str
    norm: Norm
    shape: tuple[int, ...]
    x: torch.dtype
    inputs: str
    tolerance: str
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
    over_channels: bool = False
    next_weight: torch.dtype | None = None
    next_bias: torch.dtype | None = None

    @property
    def groups(self) -> int:
        """The number of channels per sample of GroupNorm; 0 for other norms."""
        return self.shape[1] if self.channels_per_group else 0

    @property
    def channels(self) -> int:
        """The number of channels of x of GroupNorm; 0 for other norms."""
        return self.groups * self.channels_per_group

    @property
    def family(self) -> str:
        """The family whose calls autograd records, by its name in `proving.cases`."""
        others = {
            "group": self.channels_per_group,
            "gated": self.gate,
            "channels": self.over_channels,
            "added": self.fadd == "post_add",
            "renormed": self.fadd == "post_add_norm",
            "l2": self.norm not in (Norm.LAYER, Norm.RMS),
        }
        return next((name for name, holds in others.items() if holds), "plain")

    @property
    def is_beside(self) -> bool:
        """Return True if the case is no plain norm, or has a dropout."""
        return self.family != "plain" or bool(self.dropout_p)

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
        return self.out or (self.residual if self.fadd == "post_add" else None) or self.x

    @property
    def quantises(self) -> bool:
        """Return True if y is quantised."""
        return self.fquant != "none"

    @property
    def mode(self) -> Mode:
        """The line of the report that the case counts in."""
        adds = "" if self.residual is None else f" {WORDS[self.residual]}"
        extras = [f"scale {WORDS[self.scale]}"] if self.scale is not FP32 else []
        extras += [self.rounding] if self.rounding != "nearest" else []
        beside = {
            "rounded first": self.cast != "after_weight",
            f"{self.activation} gate{' before' * self.gate_first}": self.gate is not None,
            "dropout": self.dropout_p,
            "over channels": self.over_channels,
            self.activation: self.family in cases.IMAGES and self.activation != "none",
            "channels last": self.channels_last,
        }
        return Mode(
            "GroupNorm" if self.channels_per_group else self.norm.row.title,
            "backward" if self.arriving else "forward",
            ", ".join((f"{WORDS[self.x]} → {WORDS[self.y]}", *(word for word, holds in beside.items() if holds))),
            "-" if self.fadd == "none" else self.fadd + adds,
            "-" if not self.quantises else ", ".join([self.fquant, *extras]),
        )

    @property
    def id(self) -> str:
        """A name that no other case has: every field that is not its default."""
        parts = [self.suite, self.norm.row.title, "x".join(map(str, self.shape)), WORDS[self.x]]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("suite", "norm", "shape", "x", "inputs", "tolerance") or value == field.default:
                continue
            text = WORDS[value] if isinstance(value, torch.dtype) else value
            text = "+".join(value) if isinstance(value, tuple) else text
            parts.append(field.name if text is True else f"{field.name}={text}")
        if self.inputs != self.suite:
            parts.append(self.inputs)
        return "-".join(parts)

    @property
    def kernels(self) -> tuple[object, ...]:
        """Cases equal in this share most of their compiled kernels."""
        vectors = self.weight, self.bias, self.smooth_scale
        return self.mode, self.n, self.save_mv, *vectors, self.channels


class Mode(NamedTuple):
    """A line of the report."""

    norm: str
    direction: str
    dtypes: str
    fadd: str
    fquant: str
