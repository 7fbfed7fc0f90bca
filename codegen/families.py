"""The types of which rows of `parameters` are made: kinds, parameters, results, and families of functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any

from .lazy import cached_property
from .values import Direction, Norm

# The default of a required parameter.
REQUIRED = ""


class Kind(Enum):
    """The kind of a parameter or a result; the value names the macro that reads it."""

    ROWS = "rows"
    SAMPLES = "samples"
    GROUPS = "groups"
    PER_SAMPLE = "per_sample"
    VECTOR = "vector"
    PER_PART = "per_part"
    PER_ROW = "per_row"
    PER_NORM = "per_norm"
    COLUMNS = "columns"
    IMAGES = "images"
    SCALE = "scale"
    SCALES = "scales"
    VALUE = "value"
    RANDOM = "random"
    NUMBER = "number"
    COUNT = "count"
    SHAPE = "shape"
    WORD = "word"
    FLAG = "flag"
    DTYPE = "dtype"
    OUT = "out"
    OUTS = "outs"
    NAMES = "names"

    @property
    def is_tensor(self) -> bool:
        """Return True if a kernel takes the parameter as an address."""
        return self in (*_OF_ROWS, *_NOT_OF_ROWS)

    @property
    def has_row_stride(self) -> bool:
        """Return True if the tensor has a row for each row of x, with a row stride that kernels take."""
        return self in _OF_ROWS

    @property
    def is_scale(self) -> bool:
        """Return True if rows are multiplied by the values, one of which may serve all rows."""
        return self in (Kind.SCALE, Kind.SCALES)

    @property
    def is_shared(self) -> bool:
        """Return True if all rows, or all rows of a group, share the values."""
        return self in (Kind.VECTOR, Kind.PER_PART, Kind.GROUPS, Kind.VALUE, Kind.RANDOM)


_OF_ROWS = (Kind.ROWS, Kind.SAMPLES, Kind.GROUPS, Kind.PER_SAMPLE, Kind.OUT)
_NOT_OF_ROWS = (
    Kind.VECTOR,
    Kind.PER_PART,
    Kind.PER_ROW,
    Kind.PER_NORM,
    Kind.COLUMNS,
    Kind.IMAGES,
    Kind.SCALE,
    Kind.SCALES,
    Kind.VALUE,
    Kind.RANDOM,
)


@dataclass(frozen=True)
class KindRow:
    """The properties that all parameters of a kind share.

    Attributes:
        annotation: the type in a Python signature, "torch.Tensor" for example.
        schema: the type in an operator's schema, "Tensor" for example.
    """

    annotation: str
    schema: str


KINDS: Mapping[Kind, KindRow] = {
    # (..., N), of x's shape.
    Kind.ROWS: KindRow("torch.Tensor", "Tensor"),
    # (B, N) where x is (B, ..., N), one row per sample; of x's shape, one per row; or (N,), one for all rows.
    Kind.SAMPLES: KindRow("torch.Tensor", "Tensor"),
    # (G, N) where x is (..., G, N), one row per group of columns; or (N,), one for all groups.
    Kind.GROUPS: KindRow("torch.Tensor", "Tensor"),
    # (B, N), one row per sample, with any row stride.
    Kind.PER_SAMPLE: KindRow("torch.Tensor", "Tensor"),
    # (N,); for GroupNorm (C,), one value per channel.
    Kind.VECTOR: KindRow("torch.Tensor", "Tensor"),
    # (P, N) and contiguous, one row per part: per sample, or per group of columns; or (N,) where there is one part.
    Kind.PER_PART: KindRow("torch.Tensor", "Tensor"),
    # x's shape without the last dimension, fp32; for GroupNorm, whose rows are groups, (B, groups).
    Kind.PER_ROW: KindRow("torch.Tensor", "Tensor"),
    # (norms * statistics * M up to a multiple of 4,), fp32: the means, if there are any, and rstd of each norm's rows.
    Kind.PER_NORM: KindRow("torch.Tensor", "Tensor"),
    # (M, N) of any leading dimensions, or (N, M); or the scales of blocks of rows.
    Kind.COLUMNS: KindRow("torch.Tensor", "Tensor"),
    # (B, C, ...), with positions or channels innermost in memory and no gaps.
    Kind.IMAGES: KindRow("torch.Tensor", "Tensor"),
    # One fp32 value per row, of x's shape without the last dimension or with a last dimension of 1; or one value for
    # all rows, of any shape.
    Kind.SCALE: KindRow("torch.Tensor", "Tensor"),
    # Like SCALE, or one value per group of adjacent elements of a row: (..., G) if a row has G groups.
    Kind.SCALES: KindRow("torch.Tensor", "Tensor"),
    # One fp32 value, of any shape, which the host does not read.
    Kind.VALUE: KindRow("torch.Tensor", "Tensor"),
    # (2,), int64: the seed and offset of random numbers; or an object that provides them.
    Kind.RANDOM: KindRow("torch.Tensor | tuple[int, int] | torch.Generator", "Tensor"),
    Kind.NUMBER: KindRow("float", "float"),
    # A number of rows or of parts, of the integer type that counts rows.
    Kind.COUNT: KindRow("int", "int"),
    # The last dimensions of x, which are normalised together.
    Kind.SHAPE: KindRow("Sequence[int]", "int[]"),
    # The word of an enum's member, or the member.
    Kind.WORD: KindRow("str", "str"),
    Kind.FLAG: KindRow("bool", "bool"),
    Kind.DTYPE: KindRow("torch.dtype", "ScalarType"),
    # The tensor that an output is written to.
    Kind.OUT: KindRow("torch.Tensor", "Tensor"),
    # The tensors that both outputs are written to.
    Kind.OUTS: KindRow("tuple[torch.Tensor, torch.Tensor]", "Tensor[]"),
    # A collection of names, out of a fixed few.
    Kind.NAMES: KindRow("Collection[str]", "str[]"),
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a family of functions.

    Attributes:
        name: the name that callers write.
        kind: the kind of its values.
        default: the default by norm, as the signature writes it; `REQUIRED` for none. A norm without an entry lacks the
            parameter.
        meaning: the docstring's line by norm. A norm without an entry has the first one.
        positional: whether the parameter may be passed without its name.
        optional: whether None may be passed; a default of None implies it.
        words: the enum of a `Kind.WORD`.
        least: the smallest value of a `Kind.NUMBER`.
        most: the largest value of a `Kind.NUMBER`; infinity means the largest fp32 value.
        axis: the field of `Mode` that the parameter decides: by its value, by a tensor's dtype, by its presence, or,
            for a `Kind.GROUPS`, by having one row per group.
        wanted: the attribute of a mode that is true if the mode reads the parameter, "fadd.adds" for example; "" if
            every mode does.
        absent: the error if the parameter is wanted and was not passed, formatted with the words of the modes.
        unused: the error if the parameter was passed and is not wanted, formatted in the same way.
        needs: the tensor that a number other than 0 requires; without that tensor, the error is `absent`, formatted
            with the number.
        gradient: the result of the backward family that is its gradient; "" if it has none.
        result: the result that is written to a `Kind.PLACE`.
        argument: the name in errors, if callers pass the parameter as another argument; else "".
        functional: whether calls of the functional API, which autograd records, have the parameter.
        torchs: the value by norm that None means in the functional API, as in torch's function of the same signature.
        is_new: whether saved programs may lack the parameter, which operators' schemas then give its default.
    """

    name: str
    kind: Kind
    default: Mapping[Norm, str] = field(hash=False)
    meaning: Mapping[Norm, str] = field(hash=False)
    positional: bool = False
    optional: bool = False
    words: type[Enum] | None = None
    least: float = -math.inf
    most: float = math.inf
    axis: str = ""
    wanted: str = ""
    absent: str = ""
    unused: str = ""
    needs: str = ""
    gradient: str = ""
    result: str = ""
    argument: str = ""
    functional: bool = False
    torchs: Mapping[Norm, str] = field(default_factory=dict, hash=False)
    is_new: bool = False

    @property
    def is_optional(self) -> bool:
        """Return True if None may be passed."""
        return self.optional or "None" in self.default.values()

    @property
    def takes_codes(self) -> bool:
        """Return True if callers may pass ck_tile's integers for the words."""
        return self.words is not None and hasattr(self.words, "code")

    @property
    def annotation(self) -> str:
        """Return the parameter's type as the signature writes it."""
        kind = KINDS[self.kind].annotation
        if self.words is not None:
            kind = " | ".join((kind, *(("int",) if self.takes_codes else ()), self.words.__name__))
        return f"{kind} | None" if self.is_optional else kind

    @property
    def schema(self) -> str:
        """Return the parameter's type in an operator's schema, without the alias of a `Kind.PLACE`."""
        return KINDS[self.kind].schema + ("?" if self.is_optional else "")

    @property
    def declaration(self) -> str:
        """Return the parameter as an operator's schema declares it, None being the default of a new one."""
        return f"{self.schema} {self.operator_argument}{'=None' if self.is_new else ''}"

    @property
    def operator_argument(self) -> str:
        """Return the operators' name for the parameter; statistics that are passed as one tensor share a name."""
        return self.argument if self.argument and self.kind is Kind.PER_ROW else self.name

    @property
    def slot(self) -> str:
        """Return the kernels' name for the parameter; for an out, the name of the result written there."""
        return f"{self.result or self.name}_ptr" if self.kind.is_tensor else self.name

    @property
    def row_stride_slot(self) -> str | None:
        """Return the kernels' name for the parameter's row stride, or None if there is none."""
        return f"{self.result or self.name}_row_stride" if self.kind.has_row_stride else None

    @property
    def is_read_in_vectors(self) -> bool:
        """Return True if kernels are specialised for the tensor's alignment; others may be slices, read singly."""
        return not self.kind.is_scale and self.kind not in (Kind.VALUE, Kind.RANDOM)

    @property
    def scale_stride_slot(self) -> str | None:
        """Return the kernels' name for the stride between rows' values, which is 0 for one value for all rows."""
        return f"{self.name}_stride" if self.kind.is_scale else None

    def is_asked_for(self, axes: Any) -> bool:
        """Return True if a mode's axes ask for the parameter, whatever the mode's norm is."""
        return not self.wanted or bool(attrgetter(self.wanted)(axes))

    def is_wanted(self, axes: Any) -> bool:
        """Return True if calls of a mode, or of another object with the mode's axes, read the parameter."""
        return axes.norm in self.default and self.is_asked_for(axes)


@dataclass(frozen=True)
class Result:
    """One tensor that a family of functions returns.

    Attributes:
        name: the field of the returned tuple.
        kind: its shape: `Kind.ROWS`, `Kind.VECTOR`, `Kind.PER_PART`, `Kind.PER_ROW` or `Kind.PER_NORM`.
        norms: the norms that return it.
        wanted: the attribute of a mode that is true if the mode returns it; "" if every mode does.
        axis: the field of `Mode` that is its dtype.
        set_by: the parameter that sets its dtype, unless that parameter is None.
        like: the parameters whose dtype it has; the first one present counts. Without any of these, the dtype is fp32.
        is_sure: whether calls that name some of their results return it unnamed.
    """

    name: str
    kind: Kind
    norms: tuple[Norm, ...] = tuple(Norm)
    wanted: str = ""
    axis: str = ""
    set_by: str = ""
    like: tuple[str, ...] = ()
    is_sure: bool = False

    @property
    def slot(self) -> str:
        """Return the kernels' name for the result."""
        return f"{self.name}_ptr"

    @property
    def row_stride_slot(self) -> str | None:
        """Return the kernels' name for the result's row stride, or None if there is none."""
        return f"{self.name}_row_stride" if self.kind.has_row_stride else None

    @property
    def is_sum(self) -> bool:
        """Return True if the result is a sum over rows, for which each program stores a partial sum."""
        return self.kind in (Kind.VECTOR, Kind.PER_PART)

    def is_wanted(self, axes: Any) -> bool:
        """Return True if calls of a mode, or of another object with the mode's axes, return the result."""
        return axes.norm in self.norms and (not self.wanted or bool(attrgetter(self.wanted)(axes)))


@dataclass(frozen=True)
class Family:
    """Functions with the same parameters, one function per norm.

    Attributes:
        direction: backward if calls compute gradients.
        functions: the functions' names by norm.
        parameters: the parameters, in the order of signatures and schemas.
        results: the results, in order.
        name: "renormed", "modulated", "gated", "quantised", "dropped" or "group"; "" for the norms alone.
        axes: the fields of `Mode` that every call sets alike, with their values.
    """

    direction: Direction
    functions: Mapping[Norm, str] = field(hash=False)
    parameters: tuple[Parameter, ...]
    results: tuple[Result, ...]
    name: str = ""
    axes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def of(self, norm: Norm) -> tuple[Parameter, ...]:
        """Return the parameters of a norm's function."""
        return tuple(parameter for parameter in self.parameters if norm in parameter.default)

    @cached_property
    def operands(self) -> tuple[Parameter, ...]:
        """Return the tensors that callers pass, for reading or writing."""
        return tuple(parameter for parameter in self.parameters if parameter.kind.is_tensor)

    @cached_property
    def inputs(self) -> tuple[Parameter, ...]:
        """Return the tensors that are read, in the order in which launches pass them."""
        return tuple(parameter for parameter in self.operands if parameter.kind is not Kind.OUT)

    @cached_property
    def tensors(self) -> tuple[Parameter | Result, ...]:
        """Return the tensors that are read, followed by the tensors that are returned."""
        return (*self.inputs, *self.results)

    @cached_property
    def outs(self) -> tuple[Parameter, ...]:
        """Return the tensors that are written."""
        return tuple(parameter for parameter in self.operands if parameter.kind is Kind.OUT)

    def meaning(self, parameter: Parameter, norm: Norm) -> str:
        """Return the docstring's line for a parameter of a norm's function."""
        return parameter.meaning.get(norm) or next(iter(parameter.meaning.values()))

    def __getitem__(self, name: str) -> Parameter:
        return next(parameter for parameter in self.parameters if parameter.name == name)
