"""What a kernel computes: the axes, which combinations of them are legal, and every name made from them.

A `Mode` is one combination of axes without the row length; all its kernels live in one generated module.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property
from typing import Any

from .errors import IllegalCombinationError


class Norm(Enum):
    """Which normalisation; the value is the manifest's word."""

    LAYER = "layer"
    RMS = "rms"

    @property
    def prefix(self) -> str:
        """How names of this norm start."""
        return {Norm.LAYER: "ln", Norm.RMS: "rms"}[self]

    @property
    def title(self) -> str:
        """The norm's name in prose."""
        return {Norm.LAYER: "LayerNorm", Norm.RMS: "RMSNorm"}[self]

    @property
    def centres(self) -> bool:
        """Whether the row's mean is subtracted (and may be saved)."""
        return self is Norm.LAYER


class Direction(Enum):
    """Whether a kernel computes outputs or gradients; the value is the manifest's word and stands in names."""

    FORWARD = "fwd"
    BACKWARD = "bwd"

    @property
    def title(self) -> str:
        """The direction in prose."""
        return self.name.lower()


class DType(Enum):
    """Element types; the value is the manifest's word and the suffix in names."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    INT8 = "int8"
    FP8_E4M3FN = "fp8_e4m3fn"
    FP8_E4M3FNUZ = "fp8_e4m3fnuz"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return {DType.FP32: 4, DType.FP16: 2, DType.BF16: 2}.get(self, 1)

    @property
    def triton(self) -> str:
        """The type in Triton source, for the types a row's scale is stored in."""
        return {DType.FP16: "tl.float16", DType.BF16: "tl.bfloat16", DType.FP32: "tl.float32"}[self]

    @property
    def qmax(self) -> float:
        """The largest magnitude a quantised element takes: a row's amax maps to it."""
        return _QMAX[self]

    @property
    def is_quantised(self) -> bool:
        """Whether y has this type from a quantising kernel alone."""
        return self in _QMAX

    @property
    def is_fp8(self) -> bool:
        """Whether elements are small floats, which say little without a scale."""
        return self.is_quantised and not self.is_int

    @property
    def is_int(self) -> bool:
        """Whether quantised values are integers rather than small floats."""
        return self is DType.INT8


_QMAX = {
    DType.INT8: 127.0,
    DType.FP8_E4M3FN: 448.0,
    DType.FP8_E4M3FNUZ: 240.0,
    DType.FP8_E5M2: 57344.0,
}


class FusedAdd(Enum):
    """Whether a residual is added before the norm, and whether the sum is stored."""

    NONE = "none"
    PRE_ADD_STORE = "pre_add_store"
    PRE_ADD = "pre_add"

    @property
    def code(self) -> int:
        """ck_tile's integer for this mode."""
        return {FusedAdd.NONE: 0, FusedAdd.PRE_ADD_STORE: 1, FusedAdd.PRE_ADD: 2}[self]

    @property
    def adds(self) -> bool:
        """Whether a residual is read."""
        return self is not FusedAdd.NONE

    @property
    def stores(self) -> bool:
        """Whether the sum is written back."""
        return self is FusedAdd.PRE_ADD_STORE


class FusedQuant(Enum):
    """Whether a row is quantised by its own amax, and whether a smooth scale is applied first."""

    NONE = "none"
    SMOOTH_DYNAMIC = "smooth_dynamic"
    DYNAMIC = "dynamic"

    @property
    def code(self) -> int:
        """ck_tile's integer for this mode."""
        return {FusedQuant.NONE: 0, FusedQuant.SMOOTH_DYNAMIC: 1, FusedQuant.DYNAMIC: 2}[self]

    @property
    def quantises(self) -> bool:
        """Whether the output is quantised."""
        return self is not FusedQuant.NONE

    @property
    def smooths(self) -> bool:
        """Whether a smooth scale is read."""
        return self is FusedQuant.SMOOTH_DYNAMIC


class Rounding(Enum):
    """How int8 values are rounded: to nearest even, or toward zero as ck_tile does."""

    NEAREST = "nearest"
    TRUNCATE = "truncate"

    @property
    def truncates(self) -> bool:
        """Whether values are rounded toward zero."""
        return self is Rounding.TRUNCATE


class Cast(Enum):
    """Whether the normalised row is rounded once, after weight and bias, or to 16 bits before the weight as well."""

    AFTER_WEIGHT = "after_weight"
    BEFORE_WEIGHT = "before_weight"

    @property
    def comes_first(self) -> bool:
        """Whether rows are rounded before they are multiplied by the weight."""
        return self is Cast.BEFORE_WEIGHT

    def of(self, *dtypes: DType) -> Cast:
        """What this comes to where y (or dy) and x are of these types: one of 16 bits has to be among them.

        Where there is none, rows would be rounded to the fp32 that they are in.
        """
        return self if any(dtype.itemsize == 2 for dtype in dtypes) else Cast.AFTER_WEIGHT


class Gating(Enum):
    """Whether rows are multiplied by an activated gate of their own shape, and on which side of the norm."""

    NONE = "none"
    AFTER_NORM = "after_norm"
    BEFORE_NORM = "before_norm"

    @property
    def gates(self) -> bool:
        """Whether there is a gate."""
        return self is not Gating.NONE

    @property
    def is_after(self) -> bool:
        """Whether the gate comes behind weight and bias."""
        return self is Gating.AFTER_NORM

    @property
    def is_before(self) -> bool:
        """Whether what is normalised was gated."""
        return self is Gating.BEFORE_NORM


class GateActivation(Enum):
    """What becomes of a gate before rows are multiplied by it; the value is the device function's name too."""

    SILU = "silu"
    SIGMOID = "sigmoid"

    @property
    def slope(self) -> str:
        """The device function of its derivative."""
        return f"{self.value}_slope"


class Pipeline(Enum):
    """How a kernel walks a row; the value is also the kernel's suffix and its template's name."""

    ROWS = "rows"
    ONE_PASS = "one_pass"
    TWO_PASS = "two_pass"
    SPREAD = "spread"

    @property
    def summary(self) -> str:
        """What sets this pipeline apart, for headers and listings."""
        return {
            Pipeline.ROWS: "several rows a program",
            Pipeline.ONE_PASS: "one row a program, held in registers",
            Pipeline.TWO_PASS: "one row a program, read again to write it",
            Pipeline.SPREAD: "a row over several programs that exchange its statistics",
        }[self]

    def runs_on(self, arch: str) -> bool:
        """Whether kernels that walk rows so can be compiled for an architecture: sm_90 or gfx942, say.

        Programs that share a row wait for one another in PTX (`gather` in templates/primitives.py.j2), which is
        NVIDIA's; in the interpreter the first would wait for ever.
        """
        return self is not Pipeline.SPREAD or arch.startswith("sm_")


class Part(Enum):
    """Kernels that a pipeline needs beside the one that carries its name."""

    ROW_TERMS = "row_terms"
    WINDOW = "window"
    # Of GroupNorm, forward and backward.
    MOMENTS = "moments"
    TERMS = "terms"

    @property
    def is_of_groups(self) -> bool:
        """Whether it is GroupNorm's, of which the committed table holds nothing."""
        return self in (Part.MOMENTS, Part.TERMS)


INPUT_DTYPES = (DType.FP16, DType.BF16, DType.FP32)
# What x may be besides in forward kernels, times an x_scale. e4m3fnuz comes out of kernels alone: no format of OCP.
FP8_INPUT_DTYPES = (DType.FP8_E4M3FN, DType.FP8_E5M2)
QUANTISED_DTYPES = (DType.INT8, DType.FP8_E4M3FN, DType.FP8_E4M3FNUZ, DType.FP8_E5M2)

# What stands in a mode's name behind its types, in this order: by field, the value that says nothing first.
_SUFFIXES: dict[str, dict[Any, str]] = {
    "x_bias": {False: "", True: "_xb"},
    "x_gate": {False: "", True: "_xg"},
    "dropout": {False: "", True: "_drop"},
    "fadd": {FusedAdd.NONE: "", FusedAdd.PRE_ADD_STORE: "_addst", FusedAdd.PRE_ADD: "_add"},
    "cast": {Cast.AFTER_WEIGHT: "", Cast.BEFORE_WEIGHT: "_cbw"},
    "modulated": {False: "", True: "_mod"},
    "gating": {Gating.NONE: "", Gating.AFTER_NORM: "_ga", Gating.BEFORE_NORM: "_gb"},
    "gate_activation": {GateActivation.SILU: "", GateActivation.SIGMOID: "_sig"},
    "grouped": {False: "", True: "_grp"},
    "fquant": {FusedQuant.NONE: "", FusedQuant.SMOOTH_DYNAMIC: "_sdq", FusedQuant.DYNAMIC: "_dq"},
    "rounding": {Rounding.NEAREST: "", Rounding.TRUNCATE: "_trunc"},
    "scale_dtype": {DType.FP32: "", DType.FP16: "_sfp16", DType.BF16: "_sbf16"},
    "save_mv": {False: "", True: "_mv"},
}


@cache
def _names() -> re.Pattern[str]:
    """What every name fits, with a group a field: `Mode.name` read backwards."""
    words = {
        "norm": [norm.prefix for norm in Norm],
        "direction": [f"_{direction.value}" for direction in Direction],
        "dtype_in": [f"_{dtype.value}" for dtype in DType],
        "dtype_out": ["", *(f"_{dtype.value}" for dtype in DType)],
        **{name: list(suffixes.values()) for name, suffixes in _SUFFIXES.items()},
    }
    return re.compile("".join(f"(?P<{name}>{'|'.join(some)})" for name, some in words.items()))


@dataclass(frozen=True)
class Mode:
    """One legal combination of every axis but the row length.

    Raises:
        IllegalCombinationError: the axes contradict one another; the message names the rule.
    """

    norm: Norm
    dtype_in: DType
    dtype_out: DType
    fadd: FusedAdd = FusedAdd.NONE
    fquant: FusedQuant = FusedQuant.NONE
    save_mv: bool = False
    x_bias: bool = False
    scale_dtype: DType = DType.FP32
    rounding: Rounding = Rounding.NEAREST
    direction: Direction = Direction.FORWARD
    cast: Cast = Cast.AFTER_WEIGHT
    modulated: bool = False
    x_gate: bool = False
    gating: Gating = Gating.NONE
    gate_activation: GateActivation = GateActivation.SILU
    grouped: bool = False
    dropout: bool = False

    def __post_init__(self) -> None:
        floats = ", ".join(d.value for d in INPUT_DTYPES)
        if self.dtype_in not in INPUT_DTYPES:
            self._check_small_input(floats)
        if self.scale_dtype not in INPUT_DTYPES:
            raise IllegalCombinationError(
                f"scale_dtype {self.scale_dtype.value} cannot hold a row's scale; use one of {floats}"
            )
        if self.fquant.quantises and not self.dtype_out.is_quantised:
            quantised = ", ".join(d.value for d in QUANTISED_DTYPES)
            raise IllegalCombinationError(
                f"fquant {self.fquant.value} writes quantised values, and dtype_out {self.dtype_out.value} "
                f"is not a quantised type; use one of {quantised}, or fquant none"
            )
        if not self.fquant.quantises and self.dtype_out.is_quantised:
            raise IllegalCombinationError(
                f"dtype_out {self.dtype_out.value} needs a scale for each row, and fquant none computes none; "
                f"use fquant dynamic or smooth_dynamic, or one of {floats}"
            )
        if not self.fquant.quantises and self.scale_dtype is not DType.FP32:
            raise IllegalCombinationError(
                f"scale_dtype {self.scale_dtype.value} is the type of y_scale, and fquant none writes none; "
                "leave scale_dtype out, or use fquant dynamic or smooth_dynamic"
            )
        if self.rounding is Rounding.TRUNCATE and not self.dtype_out.is_int:
            raise IllegalCombinationError(
                f"rounding truncate is for int8, and dtype_out is {self.dtype_out.value}; "
                "leave rounding out, or use dtype_out int8"
            )
        if self.is_backward:
            self._check_backward()
        elif self.cast.comes_first and 2 not in (self.dtype_out.itemsize, self.dtype_in.itemsize):
            raise IllegalCombinationError(
                f"cast {self.cast.value} rounds to 16 bits first, and neither dtype_in {self.dtype_in.value} nor "
                f"dtype_out {self.dtype_out.value} has so many; leave cast out, or use fp16 or bf16 for one of them"
            )
        if self.modulated or self.x_gate:
            self._check_modulated()
        if self.gating.gates or self.gate_activation is not GateActivation.SILU or self.grouped:
            self._check_gated()
        if self.dropout and not (self.fadd.adds or self.is_backward):
            raise IllegalCombinationError(
                f"dropout is of x before a residual is added to it, and fadd is {self.fadd.value}; "
                "use fadd pre_add_store or pre_add, or leave dropout out"
            )

    def _check_gated(self) -> None:
        if not self.gating.gates:
            raise IllegalCombinationError(
                "gate_activation and grouped go with a gate; use gating after_norm or before_norm, or leave them out"
            )
        for name, said, fits in (
            ("dtype_in", self.dtype_in.value, not self.dtype_in.is_fp8),
            ("fadd", self.fadd.value, not self.fadd.adds),
            ("fquant", self.fquant.value, not self.fquant.smooths),
            ("scale_dtype", self.scale_dtype.value, self.scale_dtype is DType.FP32),
            ("rounding", self.rounding.value, not self.rounding.truncates),
            ("cast", self.cast.value, not self.cast.comes_first),
            ("x_bias", "true", not self.x_bias),
            ("modulated", "true", not self.modulated),
            ("dropout", "true", not self.dropout),
        ):
            if not fits:
                raise IllegalCombinationError(
                    f"gated norms have no {name} {said}; use another {name}, or leave gating out"
                )

    def _check_modulated(self) -> None:
        if not self.modulated:
            raise IllegalCombinationError("x_gate is of modulated norms; use modulated true, or leave x_gate out")
        if self.x_gate and not (self.fadd.stores or self.is_backward):
            raise IllegalCombinationError(
                f"x_gate scales x before a residual is added to it, and fadd is {self.fadd.value}; "
                "use fadd pre_add_store, or leave x_gate out"
            )
        for name, said, plain in (
            ("dtype_in", self.dtype_in, not self.dtype_in.is_fp8),
            ("fadd", self.fadd, self.fadd is not FusedAdd.PRE_ADD),
            ("fquant", self.fquant, not self.fquant.quantises),
            ("cast", self.cast, not self.cast.comes_first),
        ):
            if not plain:
                raise IllegalCombinationError(
                    f"modulated norms have no {name} {said.value}; use another {name}, or leave modulated out"
                )
        for name in ("x_bias", "dropout"):
            if getattr(self, name):
                raise IllegalCombinationError(f"modulated norms have no {name}; leave {name} or modulated out")

    def _check_small_input(self, floats: str) -> None:
        if self.dtype_in not in FP8_INPUT_DTYPES:
            small = ", ".join(d.value for d in FP8_INPUT_DTYPES)
            raise IllegalCombinationError(
                f"dtype_in {self.dtype_in.value} cannot be normalised; use one of {floats}, or forward {small}"
            )
        if self.is_backward:
            raise IllegalCombinationError(
                f"dtype_in {self.dtype_in.value} has no gradient; use one of {floats} with direction bwd"
            )

    def _check_backward(self) -> None:
        if self.fquant.quantises:
            raise IllegalCombinationError(
                f"fquant {self.fquant.value} has no gradient; use fquant none with direction bwd"
            )
        if self.dtype_out is not self.dtype_in:
            raise IllegalCombinationError(
                f"with direction bwd, gradients take their types from the call, and dtype_out {self.dtype_out.value} "
                "says nothing; leave dtype_out out"
            )
        if self.save_mv:
            raise IllegalCombinationError("direction bwd reads mean and rstd and saves none; leave save_mv out")
        if self.fadd is FusedAdd.PRE_ADD:
            raise IllegalCombinationError(
                "with direction bwd, fadd says whether a gradient arrives for residual_out, which pre_add does not "
                "store; use fadd none or pre_add_store"
            )

    @property
    def is_backward(self) -> bool:
        """Whether gradients are computed."""
        return self.direction is Direction.BACKWARD

    @property
    def streams(self) -> bool:
        """Whether a forward kernel reads and writes nothing of x's size but x and y, and takes x as it is."""
        further = self.fadd.adds or self.fquant.quantises or self.x_bias or self.modulated or self.gating.gates
        return not (self.is_backward or further or self.dtype_in.is_fp8)

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The pipelines that there are kernels for."""
        spreads = self.streams or (self.is_backward and not (self.shares or self.dropout))
        return tuple(p for p in Pipeline if p is not Pipeline.SPREAD or spreads)

    @property
    def shares(self) -> bool:
        """Whether, backward, programs take rows of one sample or columns of one group, and torch adds up their sums."""
        return self.modulated or self.gating.gates

    @property
    def takes_x_as_read(self) -> bool:
        """Whether what is normalised is x itself, and has no more bits than it."""
        return not (self.fadd.adds or self.x_bias or self.gating.is_before)

    @property
    def reads_gate(self) -> bool:
        """Whether a kernel has a gate's row beside each of x's."""
        return self.x_gate or self.gating.gates

    @property
    def has_window(self) -> bool:
        """Whether a kernel for rows that start anywhere stands beside one_pass: 16-bit ones are slow to read singly."""
        return self.streams and self.dtype_in.itemsize == 2

    @property
    def operand_dtype(self) -> DType:
        """What weight, residual and the like are where nothing says so: x's type, or beside an fp8 x y's or bf16."""
        if not self.dtype_in.is_fp8:
            return self.dtype_in
        return DType.BF16 if self.dtype_out.is_quantised else self.dtype_out

    @cached_property
    def name(self) -> str:
        """The generated module's name and the stem of everything named after this mode."""
        out = "" if self.dtype_out is self.dtype_in else f"_{self.dtype_out.value}"
        suffixes = (words[getattr(self, name)] for name, words in _SUFFIXES.items())
        return f"{self.norm.prefix}_{self.direction.value}_{self.dtype_in.value}{out}{''.join(suffixes)}"

    @classmethod
    def from_name(cls, name: str) -> Mode:
        """The mode of a name.

        Raises:
            IllegalCombinationError: no mode is called so.
        """
        found = _names().fullmatch(name)
        if found is not None:
            said = found.groupdict()
            dtype_in = DType(said["dtype_in"][1:])
            values = {
                "norm": next(norm for norm in Norm if norm.prefix == said["norm"]),
                "direction": Direction(said["direction"][1:]),
                "dtype_in": dtype_in,
                "dtype_out": DType(said["dtype_out"][1:]) if said["dtype_out"] else dtype_in,
                **{
                    field: next(value for value, word in words.items() if word == said[field])
                    for field, words in _SUFFIXES.items()
                },
            }
            with suppress(IllegalCombinationError):
                made = cls(**values)
                # A type that is said twice is none of a name's.
                if made.name == name:
                    return made
        raise IllegalCombinationError(
            f"no mode is called {name!r}; names are like ln_fwd_bf16 or rms_fwd_fp16_addst_mv"
        )

    @property
    def title(self) -> str:
        """The norm and the input type, in prose."""
        return f"{self.dtype_in.value} {self.norm.title} {self.direction.title}"

    @cached_property
    def features(self) -> tuple[str, ...]:
        """What this mode does beyond the bare norm, in prose."""
        if self.is_backward:
            return self._backward_features
        steps = []
        if self.dtype_in.is_fp8:
            steps.append("x multiplied by its scale")
        if self.x_bias:
            steps.append("x bias added")
        if self.x_gate:
            steps.append("x gated")
        if self.dropout:
            steps.append("dropout")
        if self.fadd.stores:
            steps.append("residual added and the sum stored")
        elif self.fadd.adds:
            steps.append("residual added")
        if self.gating.is_before:
            steps.append(self._gated)
        if self.cast.comes_first:
            steps.append("rounded before the weight")
        if self.grouped:
            steps.append("a weight for each group of columns")
        if self.modulated:
            steps.append("modulated")
        if self.gating.is_after:
            steps.append(self._gated)
        if self.fquant.quantises:
            smooth = "smooth " if self.fquant.smooths else ""
            rounding = ", truncating" if self.rounding is Rounding.TRUNCATE else ""
            scale = "" if self.scale_dtype is DType.FP32 else f" with {self.scale_dtype.value} scales"
            steps.append(f"{smooth}dynamic {self.dtype_out.value} output{scale}{rounding}")
        elif self.dtype_out is not self.dtype_in:
            steps.append(f"{self.dtype_out.value} output")
        if self.save_mv:
            steps.append("mean and rstd saved" if self.norm.centres else "rstd saved")
        return tuple(steps)

    @property
    def _gated(self) -> str:
        where = "x" if self.gating.is_before else "y"
        return f"{where} gated by {self.gate_activation.value}"

    @property
    def _backward_features(self) -> tuple[str, ...]:
        x_bias = ("x bias added and its gradient summed",) if self.x_bias else ()
        cast = ("rows rounded before the weight",) if self.cast.comes_first else ()
        dropout = ("dropout",) if self.dropout else ()
        modulated = ("modulated", *(("x gated",) if self.x_gate else ())) if self.modulated else ()
        gated = (self._gated,) if self.gating.gates else ()
        grouped = ("a weight for each group of columns",) if self.grouped else ()
        added = ("gradient of the stored sum added",) if self.fadd.stores else ()
        return (*x_bias, *dropout, *added, *cast, *modulated, *gated, *grouped)

    @cached_property
    def summary(self) -> str:
        """One line of prose: what a kernel of this mode does."""
        return ", ".join((self.title, *self.features))

    @property
    def quantiser(self) -> str:
        """The device function that rounds to this mode's quantised output."""
        truncated = "_truncated" if self.rounding.truncates else ""
        return f"to_{self.dtype_out.value}{truncated}"

    @property
    def decoder(self) -> str:
        """The device function that makes fp32 of this mode's fp8 x."""
        return f"from_{self.dtype_in.value}"

    def kernel(self, part: Pipeline | Part) -> str:
        """The kernel's symbol: what a profiler shows."""
        return f"{self.name}_{part.value}"


def legal_modes() -> Iterator[Mode]:
    """Every combination of axes that `Mode` accepts, in the order of its fields."""
    bools = (False, True)
    # Typed, because mypy gives a product of more than ten up.
    axes: tuple[Iterable[Any], ...] = (Norm, DType, DType, FusedAdd, FusedQuant, bools, bools, INPUT_DTYPES)
    axes = (*axes, Rounding, Direction, Cast)
    for values in itertools.product(*axes):
        with suppress(IllegalCombinationError):
            mode = Mode(*values)
            yield mode
            # None of them is legal where the same mode without is not.
            with suppress(IllegalCombinationError):
                yield replace(mode, dropout=True)
            yield from _gated(mode)
            for gated in bools:
                with suppress(IllegalCombinationError):
                    yield replace(mode, modulated=True, x_gate=gated)


def _gated(mode: Mode) -> Iterator[Mode]:
    """The gated forms of a mode, which are all legal if one is."""
    forms = itertools.product((Gating.AFTER_NORM, Gating.BEFORE_NORM), GateActivation, (False, True))
    with suppress(IllegalCombinationError):
        for gating, activation, grouped in forms:
            yield replace(mode, gating=gating, gate_activation=activation, grouped=grouped)
