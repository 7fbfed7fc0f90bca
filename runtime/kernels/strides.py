"""Strides of rows: as kernels take them, what compilations depend on of them, and as a `CallKind` keeps them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from math import prod
from operator import mul, or_
from typing import Any

from ..call_kinds import ROWS, CallKind
from ..codegen.lazy import cached_property
from .key import LARGEST_I32, integer_type

# Elements: what Triton's own guess at an integer stops at, and 16 bytes of the smallest type.
MOST_ALIGNED = 16


@dataclass(frozen=True)
class RowWalk:
    """The starts of rows that lie along several dimensions.

    Attributes:
        strides: of each dimension, in elements, the outermost first.
        sizes: of each but the outermost, which is M by the others.
    """

    strides: tuple[int, ...]
    sizes: tuple[int, ...]

    @cached_property
    def arguments(self) -> tuple[int, ...]:
        """The arguments of `row_offset`: the innermost stride; then, from the inside out, four values per dimension.

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


def row_alignment(*row_strides: RowStride) -> int:
    """The ROW_ALIGNMENT of a launch: the largest power of two, up to 16, that divides every row stride."""
    bits = reduce(or_, [stride for strides in row_strides for stride in strides_of(strides)], MOST_ALIGNED)
    return bits & -bits


def starts_aligned(n: int) -> bool:
    """Return True if rows of n elements without gaps can be read in vectors.

    Under batch invariance N alone says so: rows of an even N are read by what divides it, and have to lie so; those of
    an odd one element by element, and may lie anywhere.
    """
    return row_alignment(n) > 1


_STRIDE, _POINTER = "_row_stride", "_ptr"
# What an i32 does not hold, at a multiple of every alignment.
_WIDE = LARGEST_I32 + 1


def kind_of(
    mode: str,
    sizes: Mapping[str, int],
    size: int,
    dtypes: Mapping[str, Any],
    strides: Mapping[str, RowStride],
    misaligned: Collection[str],
) -> CallKind:
    """The kind of a call.

    Args:
        mode: its mode's name.
        sizes: the row length, or GroupNorm's sizes.
        size: which of `ROWS` its M is of.
        dtypes: torch's or numpy's, by the names of tensors; None of what is not there.
        strides: of rows, by their slots.
        misaligned: pointers at no multiple of 16 bytes, by their slots.
    """
    told = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items() if dtype is not None}
    apart = {}
    for slot, stride in _told_apart(strides, sizes.get("n", 0)).items():
        name = slot.removesuffix(_STRIDE)
        if stride != _adjoining(name, told, sizes):
            apart[name] = _word(stride)
    return CallKind(
        mode=mode,
        sizes=tuple(sizes.items()),
        dtypes=tuple(sorted(told.items())),
        strides=tuple(sorted(apart.items())),
        misaligned=tuple(sorted(slot.removesuffix(_POINTER) for slot in misaligned)),
        rows=ROWS[size],
    )


def strides_of_kind(kind: CallKind, slots: Collection[str]) -> dict[str, RowStride]:
    """The strides of a kind's rows, by these slots."""
    names = {slot: slot.removesuffix(_STRIDE) for slot in slots}
    given, told = {name: _stride(word) for name, word in kind.strides}, dict(kind.dtypes)
    return {slot: given.get(name, _adjoining(name, told, kind.size)) for slot, name in names.items()}


def misaligned_of_kind(kind: CallKind) -> frozenset[str]:
    """The slots of a kind's misaligned pointers."""
    return frozenset(f"{name}{_POINTER}" for name in kind.misaligned)


def _adjoining(name: str, dtypes: Mapping[str, str], sizes: Mapping[str, int]) -> int:
    return sizes["n"] if name in dtypes else 0


def _told_apart(strides: Mapping[str, RowStride], n: int) -> dict[str, RowStride]:
    """For each of the strides the smallest that compilations of rows of n elements do not tell from it."""
    found: dict[str, RowStride] = {
        slot: _walk(stride) if isinstance(stride, RowWalk) else _like(stride, n) for slot, stride in strides.items()
    }
    x, y = "x_row_stride", "y_row_stride"
    # Kernels of rows that start anywhere take those of y that start as x's do.
    of_y = found.get(y)
    if isinstance(of_y, int) and found.get(x) == of_y and strides[x] != strides[y]:
        found[y] = of_y + MOST_ALIGNED
    return found


def _like(stride: int, n: int) -> int:
    """The smallest stride beyond n of the same alignment and type; n and 0 stand for themselves."""
    if stride in (0, n):
        return stride
    alignment = row_alignment(stride)
    least = max(n, _WIDE if stride > LARGEST_I32 else 0) + 1
    found = -(-least // alignment) * alignment
    return found if row_alignment(found) == alignment else found + alignment


def _walk(walk: RowWalk) -> RowWalk:
    """A walk of as many strides, with sizes of 2, of which the same is known."""
    inner, *outer = reversed(walk.strides)
    strides = [_like(inner, 0)]
    for size, nearer, further in zip(reversed(walk.sizes), reversed(walk.strides), outer, strict=False):
        past = -(-2 * strides[-1] // MOST_ALIGNED) * MOST_ALIGNED
        is_wide = abs(further - size * nearer) > LARGEST_I32
        strides.append(past + row_alignment(further) + (2 * _WIDE if is_wide else 0))
    return RowWalk(tuple(reversed(strides)), (2,) * len(walk.sizes))


def _word(stride: RowStride) -> str:
    if not isinstance(stride, RowWalk):
        return str(stride)
    first, *others = stride.strides
    return "x".join(map(str, (first, *[each for pair in zip(stride.sizes, others, strict=True) for each in pair])))


def _stride(word: str) -> RowStride:
    parts = [int(part) for part in word.split("x")]
    return parts[0] if len(parts) == 1 else RowWalk(tuple(parts[::2]), tuple(parts[1::2]))
