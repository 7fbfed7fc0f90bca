"""The parameters of the runtime's functions, declared once: a row a parameter, a row a kind, a family a direction.

Signatures, docstrings, reading and keys are emitted from these rows (`templates/calls.py.j2`); checks, operators'
schemas, stand-ins and kernels' slots are looped from them. What a call costs is its family's rows and no others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any

from .model import Cast, Direction, FusedAdd, FusedQuant, Norm, Rounding

# The default of what has to be passed.
REQUIRED = ""


class Kind(Enum):
    """What a parameter or a result is; the value names the macro that reads it."""

    ROWS = "rows"
    VECTOR = "vector"
    PER_ROW = "per_row"
    NUMBER = "number"
    WORD = "word"
    FLAG = "flag"
    DTYPE = "dtype"
    PLACE = "place"
    NAMES = "names"

    @property
    def is_tensor(self) -> bool:
        """Whether it has an address."""
        return self in (Kind.ROWS, Kind.VECTOR, Kind.PER_ROW, Kind.PLACE)

    @property
    def has_row_stride(self) -> bool:
        """Whether it is (..., N), and kernels are told how far its rows are apart."""
        return self in (Kind.ROWS, Kind.PLACE)


@dataclass(frozen=True)
class KindRow:
    """What every parameter of a kind has in common.

    Attributes:
        annotation: its type in a signature; "torch.Tensor".
        schema: its type in an operator's schema; "Tensor".
    """

    annotation: str
    schema: str


KINDS: Mapping[Kind, KindRow] = {
    # (..., N), of x's shape.
    Kind.ROWS: KindRow("torch.Tensor", "Tensor"),
    # (N,).
    Kind.VECTOR: KindRow("torch.Tensor", "Tensor"),
    # x's shape without the last dimension, fp32.
    Kind.PER_ROW: KindRow("torch.Tensor", "Tensor"),
    Kind.NUMBER: KindRow("float", "float"),
    # The word of an enum's member, or the member.
    Kind.WORD: KindRow("str", "str"),
    Kind.FLAG: KindRow("bool", "bool"),
    Kind.DTYPE: KindRow("torch.dtype", "ScalarType"),
    # Where an output goes: rows that are written.
    Kind.PLACE: KindRow("torch.Tensor", "Tensor"),
    # Some names of a few.
    Kind.NAMES: KindRow("Collection[str]", "str[]"),
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a family of functions.

    Attributes:
        name: as callers write it.
        kind: what it is.
        default: by norm, as the signature writes it, `REQUIRED` for none; a norm that is not there lacks the parameter.
        meaning: by norm, the docstring's line; where one is missing it refers to the family's first function.
        positional: whether it may be passed without its name.
        optional: whether None may be passed; a default of None says so by itself.
        words: of a `Kind.WORD`: the enum.
        least: of a `Kind.NUMBER`: the least that is taken.
        axis: the field of `Mode` that it decides: by its value, by a tensor's dtype, or by being there.
        wanted: the attribute of a mode that is true where it is read, "fadd.adds" say; "" where no axis says so.
        absent: the error if it is wanted and was not passed, formatted with the words of the modes.
        unused: the error if it was passed and is not wanted, likewise.
        needs: of a number: the tensor that is to be there, unless the number is 0; `absent`, formatted with the number,
            is the error if it is not.
        gradient: the result of the backward family that is its gradient; "" if it has none.
        result: of a `Kind.PLACE`: the result that goes there.
        functional: whether calls of the functional API, which autograd records, have it.
    """

    name: str
    kind: Kind
    default: Mapping[Norm, str] = field(hash=False)
    meaning: Mapping[Norm, str] = field(hash=False)
    positional: bool = False
    optional: bool = False
    words: type[Enum] | None = None
    least: float = -math.inf
    axis: str = ""
    wanted: str = ""
    absent: str = ""
    unused: str = ""
    needs: str = ""
    gradient: str = ""
    result: str = ""
    functional: bool = False

    @property
    def is_optional(self) -> bool:
        """Whether None may be passed."""
        return self.optional or "None" in self.default.values()

    @property
    def takes_codes(self) -> bool:
        """Whether ck_tile's integers stand for its words."""
        return self.words is not None and hasattr(self.words, "code")

    @property
    def annotation(self) -> str:
        """Its type, as the signature writes it."""
        kind = KINDS[self.kind].annotation
        if self.words is not None:
            kind = " | ".join((kind, *(("int",) if self.takes_codes else ()), self.words.__name__))
        return f"{kind} | None" if self.is_optional else kind

    @property
    def schema(self) -> str:
        """Its type in an operator's schema, where `Kind.PLACE` has no alias yet."""
        return KINDS[self.kind].schema + ("?" if self.is_optional else "")

    @property
    def slot(self) -> str:
        """The kernels' name for it: that of what is written there, if it is a place."""
        return f"{self.result or self.name}_ptr" if self.kind.is_tensor else self.name

    @property
    def row_stride_slot(self) -> str | None:
        """The kernels' name for how far its rows are apart."""
        return f"{self.result or self.name}_row_stride" if self.kind.has_row_stride else None

    def is_wanted(self, axes: Any) -> bool:
        """Whether calls of a mode, or of anything else that has its axes, read it."""
        return axes.norm in self.default and (not self.wanted or bool(attrgetter(self.wanted)(axes)))


@dataclass(frozen=True)
class Result:
    """One tensor that a family of functions returns.

    Attributes:
        name: the field of what is returned.
        kind: its shape: `Kind.ROWS`, `Kind.VECTOR` or `Kind.PER_ROW`.
        norms: those that have it.
        wanted: as of a parameter.
        axis: the field of `Mode` that is its dtype.
        told: the parameter that is its dtype, unless that is None.
        like: the parameters whose dtype it has, the first that is there; where nothing else is said it is fp32.
    """

    name: str
    kind: Kind
    norms: tuple[Norm, ...] = tuple(Norm)
    wanted: str = ""
    axis: str = ""
    told: str = ""
    like: tuple[str, ...] = ()

    @property
    def slot(self) -> str:
        """The kernels' name for it."""
        return f"{self.name}_ptr"

    @property
    def row_stride_slot(self) -> str | None:
        """The kernels' name for how far its rows are apart."""
        return f"{self.name}_row_stride" if self.kind.has_row_stride else None

    def is_wanted(self, axes: Any) -> bool:
        """Whether calls of a mode, or of anything else that has its axes, return it."""
        return axes.norm in self.norms and (not self.wanted or bool(attrgetter(self.wanted)(axes)))


@dataclass(frozen=True)
class Family:
    """Functions of the same parameters, one a norm.

    Attributes:
        direction: whether calls of them compute gradients.
        functions: their names, by norm; the first is the one that the others' docstrings refer to.
        parameters: in the order of signatures and schemas.
        results: what they return, in order.
    """

    direction: Direction
    functions: Mapping[Norm, str] = field(hash=False)
    parameters: tuple[Parameter, ...]
    results: tuple[Result, ...]

    def of(self, norm: Norm) -> tuple[Parameter, ...]:
        """The parameters of a norm's function."""
        return tuple(parameter for parameter in self.parameters if norm in parameter.default)

    @property
    def inputs(self) -> tuple[Parameter, ...]:
        """The tensors that are read, in the order in which launches bring them."""
        return tuple(p for p in self.parameters if p.kind.is_tensor and p.kind is not Kind.PLACE)

    @property
    def places(self) -> tuple[Parameter, ...]:
        """The tensors that are written."""
        return tuple(p for p in self.parameters if p.kind is Kind.PLACE)

    def meaning(self, parameter: Parameter, norm: Norm) -> str:
        """What the docstring of a norm's function says of a parameter."""
        return parameter.meaning.get(norm) or f"see `{next(iter(self.functions.values()))}`."

    def __getitem__(self, name: str) -> Parameter:
        return next(parameter for parameter in self.parameters if parameter.name == name)


def _each(default: str) -> dict[Norm, str]:
    return dict.fromkeys(Norm, default)


def _first(meaning: str) -> dict[Norm, str]:
    return {Norm.LAYER: meaning}


FORWARD = Family(
    direction=Direction.FORWARD,
    functions={Norm.LAYER: "layernorm2d_fwd", Norm.RMS: "rmsnorm2d_fwd"},
    parameters=(
        Parameter(
            "x",
            Kind.ROWS,
            default=_each(REQUIRED),
            meaning={
                Norm.LAYER: (
                    "(..., N), fp16, bf16 or fp32; any row stride, the last dimension contiguous, on a GPU (or "
                    "anywhere under TRITON_INTERPRET=1). M, the number of rows, may be 0."
                ),
                Norm.RMS: "see `layernorm2d_fwd`, as for every argument not listed here.",
            },
            positional=True,
            axis="dtype_in",
            gradient="dx",
            functional=True,
        ),
        Parameter(
            "weight",
            Kind.VECTOR,
            default=_each("None"),
            meaning=_each("(N,), fp16, bf16 or fp32, or None for 1."),
            positional=True,
            gradient="dweight",
            functional=True,
        ),
        Parameter(
            "bias",
            Kind.VECTOR,
            default={Norm.LAYER: "None"},
            meaning=_first("(N,), likewise, or None for 0."),
            positional=True,
            gradient="dbias",
            functional=True,
        ),
        Parameter(
            "eps",
            Kind.NUMBER,
            default={Norm.LAYER: "1e-5", Norm.RMS: "1e-6"},
            meaning={Norm.LAYER: "added to the variance.", Norm.RMS: "added to the mean square."},
            least=0.0,
            functional=True,
        ),
        Parameter(
            "weight_offset",
            Kind.NUMBER,
            default={Norm.RMS: "0.0"},
            meaning={Norm.RMS: "added to every weight, in fp32."},
            needs="weight",
            absent="weight_offset={weight_offset} is added to weight and none was passed; pass weight",
        ),
        Parameter(
            "residual",
            Kind.ROWS,
            default=_each("None"),
            meaning=_first("x's shape, fp16, bf16 or fp32; goes with fadd."),
            wanted="fadd.adds",
            absent="fadd {fadd!r} adds a residual and none was passed; pass residual, or fadd='none'",
            unused="residual was passed and fadd 'none' would ignore it; pass fadd='pre_add_store' or 'pre_add'",
            gradient="dx",
            functional=True,
        ),
        Parameter(
            "fadd",
            Kind.WORD,
            default=_each('"none"'),
            meaning=_first(
                '"none" (0), "pre_add_store" (1: add residual, return the sum as residual_out) or "pre_add" (2: add '
                "it)."
            ),
            words=FusedAdd,
            axis="fadd",
        ),
        Parameter(
            "smooth_scale",
            Kind.VECTOR,
            default=_each("None"),
            meaning=_first('(N,), fp16, bf16 or fp32, of any sign; goes with fquant "smooth_dynamic".'),
            wanted="fquant.smooths",
            absent=(
                "fquant 'smooth_dynamic' multiplies by a smooth_scale and none was passed; pass it, or fquant='dynamic'"
            ),
            unused=("smooth_scale was passed and fquant {fquant!r} would ignore it; pass fquant='smooth_dynamic'"),
        ),
        Parameter(
            "fquant",
            Kind.WORD,
            default=_each('"none"'),
            meaning=_first('"none" (0), "smooth_dynamic" (1) or "dynamic" (2).'),
            words=FusedQuant,
            axis="fquant",
        ),
        Parameter(
            "x_bias",
            Kind.VECTOR,
            default=_each("None"),
            meaning=_first("(N,), added to every row of x before anything else, or None."),
            axis="x_bias",
            wanted="x_bias",
            gradient="dx_bias",
        ),
        Parameter(
            "out_dtype",
            Kind.DTYPE,
            default=_each("None"),
            meaning=_first("y's dtype; None is x's dtype, or int8 when quantised, or that of `out`."),
            axis="dtype_out",
            functional=True,
        ),
        Parameter(
            "scale_dtype",
            Kind.DTYPE,
            default=_each("torch.float32"),
            meaning=_first("y_scale's dtype: float32, float16 or bfloat16. y is divided by the scale as stored."),
            axis="scale_dtype",
        ),
        Parameter(
            "save_mv",
            Kind.FLAG,
            default=_each("False"),
            meaning={Norm.LAYER: "return mean and rstd.", Norm.RMS: "return rstd; mean is always None."},
            axis="save_mv",
        ),
        Parameter(
            "rounding",
            Kind.WORD,
            default=_each('"nearest"'),
            meaning=_first('int8 only: "nearest" (even) or "truncate" (toward zero, as ck_tile does).'),
            words=Rounding,
            axis="rounding",
        ),
        Parameter(
            "cast",
            Kind.WORD,
            default=_each('"after_weight"'),
            meaning=_first(
                '"after_weight" (rows are rounded once, to y\'s dtype) or "before_weight" (to 16 bits before they are '
                "multiplied by weight as well, as Hugging Face's Llama and T5 do: to y's dtype if it has so many, or "
                "x's)."
            ),
            words=Cast,
            axis="cast",
            functional=True,
        ),
        Parameter(
            "out",
            Kind.PLACE,
            default=_each("None"),
            meaning=_first(
                "where y goes, instead of a new tensor; may be x or residual itself if the dtype is the same."
            ),
            result="y",
        ),
        Parameter(
            "residual_out",
            Kind.PLACE,
            default=_each("None"),
            meaning=_first(
                "where the sum goes, instead of a new tensor, in residual's dtype; may be residual or x itself."
            ),
            wanted="fadd.stores",
            unused=("residual_out was passed and fadd {fadd!r} does not store the sum; pass fadd='pre_add_store'"),
            result="residual_out",
        ),
    ),
    results=(
        Result("y", Kind.ROWS, axis="dtype_out"),
        Result("residual_out", Kind.ROWS, wanted="fadd.stores", like=("residual",)),
        Result("y_scale", Kind.PER_ROW, wanted="fquant.quantises", axis="scale_dtype"),
        Result("mean", Kind.PER_ROW, norms=(Norm.LAYER,), wanted="save_mv"),
        Result("rstd", Kind.PER_ROW, wanted="save_mv"),
    ),
)


BACKWARD = Family(
    direction=Direction.BACKWARD,
    functions={Norm.LAYER: "layernorm2d_bwd", Norm.RMS: "rmsnorm2d_bwd"},
    parameters=(
        Parameter(
            "dy",
            Kind.ROWS,
            default=_each(REQUIRED),
            meaning=_first("(..., N), fp16, bf16 or fp32: the gradient of y; None counts as zero."),
            positional=True,
            optional=True,
            functional=True,
        ),
        Parameter(
            "x",
            Kind.ROWS,
            default=_each(REQUIRED),
            meaning=_first("dy's shape, likewise: what was normalised. After a fused add that is residual_out."),
            positional=True,
            axis="dtype_in",
            functional=True,
        ),
        Parameter(
            "weight",
            Kind.VECTOR,
            default=_each("None"),
            meaning=_first("(N,), or None where the forward call had none."),
            positional=True,
            functional=True,
        ),
        Parameter(
            "mean",
            Kind.PER_ROW,
            default={Norm.LAYER: REQUIRED},
            meaning=_first("x's shape without the last dimension, fp32, as the forward call saved it."),
        ),
        Parameter("rstd", Kind.PER_ROW, default=_each(REQUIRED), meaning=_first("likewise."), functional=True),
        Parameter(
            "weight_offset",
            Kind.NUMBER,
            default={Norm.RMS: "0.0"},
            meaning={Norm.RMS: "as the forward call was given it."},
            needs="weight",
            absent="weight_offset={weight_offset} is added to weight and none was passed; pass weight",
        ),
        Parameter(
            "x_bias",
            Kind.VECTOR,
            default=_each("None"),
            meaning=_first("(N,), if the forward call added one to x; leave it out where x is residual_out."),
            axis="x_bias",
            wanted="x_bias",
        ),
        Parameter(
            "dresidual_out",
            Kind.ROWS,
            default=_each("None"),
            meaning=_first("x's shape: the gradient of residual_out, added to dx before it is rounded."),
            axis="fadd",
            wanted="fadd.stores",
            functional=True,
        ),
        Parameter(
            "cast",
            Kind.WORD,
            default=_each('"after_weight"'),
            meaning=_first("as the forward call was given it; dweight is then of the rounded rows."),
            words=Cast,
            axis="cast",
            functional=True,
        ),
        Parameter(
            "dx_dtype", Kind.DTYPE, default=_each("None"), meaning=_first("dx's dtype; None is x's."), functional=True
        ),
        Parameter(
            "bias_dtype",
            Kind.DTYPE,
            default={Norm.LAYER: "None"},
            meaning=_first("dbias's dtype; None is weight's, or x's without a weight."),
            functional=True,
        ),
        Parameter(
            "wants",
            Kind.NAMES,
            default=_each('("dx",)'),
            meaning=_first('which of "dx", "dweight", "dbias" and "dx_bias" to compute; nothing else is.'),
            functional=True,
        ),
    ),
    results=(
        Result("dx", Kind.ROWS, told="dx_dtype", like=("x",)),
        Result("dweight", Kind.VECTOR, like=("weight",)),
        Result("dbias", Kind.VECTOR, norms=(Norm.LAYER,), told="bias_dtype", like=("weight", "x")),
        Result("dx_bias", Kind.VECTOR, wanted="x_bias", like=("x_bias",)),
    ),
)

FAMILIES = (FORWARD, BACKWARD)
