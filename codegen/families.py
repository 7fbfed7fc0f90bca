"""What a row of `parameters` can say: the kinds of parameters, a parameter, a result, and a family of functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any

from .lazy import cached_property
from .values import Direction, Norm

# The default of what has to be passed.
REQUIRED = ""


class Kind(Enum):
    """What a parameter or a result is; the value names the macro that reads it."""

    ROWS = "rows"
    SAMPLES = "samples"
    GROUPS = "groups"
    PER_SAMPLE = "per_sample"
    VECTOR = "vector"
    PER_PART = "per_part"
    PER_ROW = "per_row"
    IMAGES = "images"
    SCALE = "scale"
    VALUE = "value"
    RANDOM = "random"
    NUMBER = "number"
    COUNT = "count"
    WORD = "word"
    FLAG = "flag"
    DTYPE = "dtype"
    PLACE = "place"
    NAMES = "names"

    @property
    def is_tensor(self) -> bool:
        """Whether it has an address."""
        return self in (*_OF_ROWS, *_NOT_OF_ROWS)

    @property
    def has_row_stride(self) -> bool:
        """Whether it has a row for each of x's, and kernels are told how far they are apart."""
        return self in _OF_ROWS

    @property
    def is_shared(self) -> bool:
        """Whether all rows share it, or all of a group's."""
        return self in (Kind.VECTOR, Kind.PER_PART, Kind.GROUPS, Kind.VALUE, Kind.RANDOM)


_OF_ROWS = (Kind.ROWS, Kind.SAMPLES, Kind.GROUPS, Kind.PER_SAMPLE, Kind.PLACE)
_NOT_OF_ROWS = (Kind.VECTOR, Kind.PER_PART, Kind.PER_ROW, Kind.IMAGES, Kind.SCALE, Kind.VALUE, Kind.RANDOM)


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
    # (B, N) where x is (B, ..., N), one a sample; of x's shape, one a row; or (N,), one for all.
    Kind.SAMPLES: KindRow("torch.Tensor", "Tensor"),
    # (G, N) where x is (..., G, N), one a group of columns; or (N,), one for all.
    Kind.GROUPS: KindRow("torch.Tensor", "Tensor"),
    # (B, N), one row per sample, on any stride.
    Kind.PER_SAMPLE: KindRow("torch.Tensor", "Tensor"),
    # (N,); of GroupNorm (C,), one value per channel.
    Kind.VECTOR: KindRow("torch.Tensor", "Tensor"),
    # (P, N) and contiguous, one row per part: per sample, or per group of columns; or (N,) where there is one part.
    Kind.PER_PART: KindRow("torch.Tensor", "Tensor"),
    # x's shape without the last dimension, fp32; of GroupNorm, whose rows are groups, (B, groups).
    Kind.PER_ROW: KindRow("torch.Tensor", "Tensor"),
    # (B, C, ...), with positions or channels innermost in memory and no gaps.
    Kind.IMAGES: KindRow("torch.Tensor", "Tensor"),
    # One value a row, x's shape without the last dimension or with one of 1 there, or one for all, of any shape; fp32.
    Kind.SCALE: KindRow("torch.Tensor", "Tensor"),
    # One fp32 value, of any shape, that the host does not read.
    Kind.VALUE: KindRow("torch.Tensor", "Tensor"),
    # (2,), int64: the seed and the offset that random numbers follow from; or what they are made from.
    Kind.RANDOM: KindRow("torch.Tensor | tuple[int, int] | torch.Generator", "Tensor"),
    Kind.NUMBER: KindRow("float", "float"),
    # A number of rows or of parts, of the type that counts rows.
    Kind.COUNT: KindRow("int", "int"),
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
        most: likewise the most; infinity stands for the largest that fp32 holds.
        axis: the field of `Mode` that it decides: by its value, by a tensor's dtype, by being there, or, of a
            `Kind.GROUPS`, by being one a group.
        wanted: the attribute of a mode that is true where it is read, "fadd.adds" say; "" where no axis says so.
        absent: the error if it is wanted and was not passed, formatted with the words of the modes.
        unused: the error if it was passed and is not wanted, likewise.
        needs: of a number: the tensor that is to be there, unless the number is 0; `absent`, formatted with the number,
            is the error if it is not.
        gradient: the result of the backward family that is its gradient; "" if it has none.
        result: of a `Kind.PLACE`: the result that goes there.
        argument: what errors call it, where callers pass it as another argument; "" where they do by its name.
        functional: whether calls of the functional API, which autograd records, have it.
        torchs: by norm, what None stands for there, as in the torch function of the same signature.
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

    @property
    def is_read_in_vectors(self) -> bool:
        """Whether kernels are compiled for where it lies; others are read one by one, and may be slices of a tensor."""
        return self.kind not in (Kind.SCALE, Kind.VALUE, Kind.RANDOM)

    @property
    def scale_stride_slot(self) -> str | None:
        """The kernels' name for how far a row's value is from the next one's, 0 where there is one for all."""
        return f"{self.name}_stride" if self.kind is Kind.SCALE else None

    def is_asked_for(self, axes: Any) -> bool:
        """Whether a mode's axes, whatever its norm, are such that it is read."""
        return not self.wanted or bool(attrgetter(self.wanted)(axes))

    def is_wanted(self, axes: Any) -> bool:
        """Whether calls of a mode, or of anything else that has its axes, read it."""
        return axes.norm in self.default and self.is_asked_for(axes)


@dataclass(frozen=True)
class Result:
    """One tensor that a family of functions returns.

    Attributes:
        name: the field of what is returned.
        kind: its shape: `Kind.ROWS`, `Kind.VECTOR`, `Kind.PER_PART` or `Kind.PER_ROW`.
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

    @property
    def is_sum(self) -> bool:
        """Return True if the result is a sum over rows, of which each program leaves a partial sum."""
        return self.kind in (Kind.VECTOR, Kind.PER_PART)

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
        neighbour: what stands beside the norm, "modulated", "gated" or "quantised"; "" of the norms alone.
    """

    direction: Direction
    functions: Mapping[Norm, str] = field(hash=False)
    parameters: tuple[Parameter, ...]
    results: tuple[Result, ...]
    neighbour: str = ""

    def of(self, norm: Norm) -> tuple[Parameter, ...]:
        """The parameters of a norm's function."""
        return tuple(parameter for parameter in self.parameters if norm in parameter.default)

    @cached_property
    def operands(self) -> tuple[Parameter, ...]:
        """The tensors that are passed, read or written."""
        return tuple(parameter for parameter in self.parameters if parameter.kind.is_tensor)

    @cached_property
    def inputs(self) -> tuple[Parameter, ...]:
        """The tensors that are read, in the order in which launches bring them."""
        return tuple(parameter for parameter in self.operands if parameter.kind is not Kind.PLACE)

    @cached_property
    def tensors(self) -> tuple[Parameter | Result, ...]:
        """The tensors that are read, and then those that are returned."""
        return (*self.inputs, *self.results)

    @cached_property
    def places(self) -> tuple[Parameter, ...]:
        """The tensors that are written."""
        return tuple(parameter for parameter in self.operands if parameter.kind is Kind.PLACE)

    def meaning(self, parameter: Parameter, norm: Norm) -> str:
        """What the docstring of a norm's function says of a parameter."""
        return parameter.meaning.get(norm) or f"see `{next(iter(self.functions.values()))}`."

    def __getitem__(self, name: str) -> Parameter:
        return next(parameter for parameter in self.parameters if parameter.name == name)
