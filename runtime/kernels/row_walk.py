"""Rows that lie on several strides, the heads of a packed tensor say, as kernels are told of them."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul

from ..codegen.lazy import cached_property
from .key import integer_type


@dataclass(frozen=True)
class RowWalk:
    """Where rows start that several dimensions lead to.

    Attributes:
        strides: of each dimension, in elements, the outermost first.
        sizes: of each but the outermost, which is M by the others.
    """

    strides: tuple[int, ...]
    sizes: tuple[int, ...]

    @cached_property
    def arguments(self) -> tuple[int, ...]:
        """What `row_offset` takes: the innermost stride; then, from the inside out, four values for each dimension.

        Rows are counted through all dimensions, and each `every` rows lie a jump further than the stride alone has
        them: a quotient is all that is computed of a row's number, and no remainder.
        """
        inner_first = tuple(reversed(self.strides))
        sizes = tuple(reversed(self.sizes))
        found = [inner_first[0]]
        for every, size, inner, outer in zip(accumulate(sizes, mul), sizes, inner_first, inner_first[1:], strict=False):
            found += [every, *_reciprocal(every), outer - size * inner]
        return tuple(found)

    def types(self, rows: str) -> tuple[str, ...]:
        """Triton's words for them: what rows are divided by is of the type that counts rows."""
        words = [integer_type(abs(value)) for value in self.arguments]
        words[1::_VALUES] = [rows] * len(self.sizes)
        return tuple(words)

    @property
    def reach(self) -> int:
        """From the first row to the last that one step of the outermost dimension leads to, in elements."""
        return sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides[1:], strict=True))

    @property
    def rows(self) -> int:
        """How many rows those are."""
        return prod(self.sizes)


# Of each dimension but the innermost: how many rows, their reciprocal in two, and the jump.
_VALUES = 4

# What the strides of a tensor's rows come to: mostly one.
RowStride = int | RowWalk

# Bits of the numbers of rows that an i32 holds.
_BITS = 31


def _reciprocal(every: int) -> tuple[int, int]:
    """A multiplier and a shift: umulhi(row, multiplier) >> shift is row // every, of two or more."""
    bits = (every - 1).bit_length()
    return -(-(1 << (_BITS + bits)) // every), bits - 1


def strides_of(stride: RowStride) -> tuple[int, ...]:
    """All of them."""
    return stride.strides if isinstance(stride, RowWalk) else (stride,)


def strides_told(arguments: Sized) -> int:
    """How many strides the arguments of a walk, or their types, are of."""
    return 1 + (len(arguments) - 1) // _VALUES
