"""Strides of rows: as kernel arguments, as far as compilations depend on strides, and in a `CallKind`."""

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
from .gpu import LARGEST_I32, integer_type

# In elements: the largest divisor of an integer that Triton specialises on, and 16 bytes of the smallest type.
MOST_ALIGNED = 16


@dataclass(frozen=True)
class RowWalk:
    """The starts of rows that extend over several dimensions.

    Attributes:
        strides: the stride of each dimension, in elements, outermost first.
        sizes: the size of each dimension except the outermost, whose size is M divided by the product of `sizes`.
    """

    strides: tuple[int, ...]
    sizes: tuple[int, ...]

    @cached_property
    def arguments(self) -> tuple[int, ...]:
        """Return the arguments of `row_offset`: the innermost stride, then, inside out, four values per dimension.

        Rows are numbered through all dimensions, and every `every` rows the offset grows by a jump in addition to the
        stride. A row's offset therefore needs a quotient of the row's number, and no remainder.
        """
        inner_first = tuple(reversed(self.strides))
        sizes = tuple(reversed(self.sizes))
        steps = [inner_first[0]]
        for every, size, inner, outer in zip(accumulate(sizes, mul), sizes, inner_first, inner_first[1:], strict=False):
            steps += [every, *_reciprocal(every), outer - size * inner]
        return tuple(steps)

    def types(self, rows: str) -> tuple[str, ...]:
        """Return the types of the arguments in Triton's words: divisors of row numbers have the type of M, `rows`."""
        words = [integer_type(abs(value)) for value in self.arguments]
        words[1::_VALUES] = [rows] * len(self.sizes)
        return tuple(words)

    @property
    def reach(self) -> int:
        """The distance from the first to the last row within one step of the outermost dimension, in elements."""
        return sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides[1:], strict=True))

    @property
    def rows(self) -> int:
        """The number of rows within one step of the outermost dimension."""
        return prod(self.sizes)


# Values per dimension except the innermost: the number of rows, its reciprocal in two values, and the jump.
_VALUES = 4

# The strides of a tensor's rows; mostly a single stride.
RowStride = int | RowWalk

# Bits of a row number in an i32.
_BITS = 31


def _reciprocal(every: int) -> tuple[int, int]:
    """Return a multiplier and a shift: umulhi(row, multiplier) >> shift is row // every, if `every` is 2 or more."""
    bits = (every - 1).bit_length()
    return -(-(1 << (_BITS + bits)) // every), bits - 1


def strides_of(stride: RowStride) -> tuple[int, ...]:
    """Return all strides as a tuple."""
    return stride.strides if isinstance(stride, RowWalk) else (stride,)


def strides_told(arguments: Sized) -> int:
    """Return the number of strides that the arguments of a walk, or the types of the arguments, describe."""
    return 1 + (len(arguments) - 1) // _VALUES


def row_alignment(*row_strides: RowStride) -> int:
    """Return the ROW_ALIGNMENT of a launch: the largest power of two, up to 16, that divides every row stride."""
    bits = reduce(or_, [stride for strides in row_strides for stride in strides_of(strides)], MOST_ALIGNED)
    return bits & -bits


def starts_aligned(n: int) -> bool:
    """Return True if rows of n elements without gaps can be read in vectors.

    Under batch invariance the answer depends on N alone. Rows of an even N are read in vectors of a power of two that
    divides N, and must be aligned accordingly. Rows of an odd N are read element by element, and may start anywhere.
    """
    return row_alignment(n) > 1


_STRIDE, _POINTER = "_row_stride", "_ptr"
# The smallest positive value that does not fit into an i32, a multiple of every alignment.
_WIDE = LARGEST_I32 + 1


def kind_of(
    mode: str,
    sizes: Mapping[str, int],
    size: int,
    dtypes: Mapping[str, Any],
    strides: Mapping[str, RowStride],
    misaligned: Collection[str],
) -> CallKind:
    """Return the kind of a call.

    Args:
        mode: the name of the call's mode.
        sizes: the row length, or GroupNorm's sizes.
        size: the index in `ROWS` of the class of the call's M.
        dtypes: dtypes of torch or numpy, by the names of tensors; None for an absent tensor.
        strides: row strides, by slots.
        misaligned: slots of pointers that are not multiples of 16 bytes.
    """
    words = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items() if dtype is not None}
    smallest = {slot.removesuffix(_STRIDE): each for slot, each in _smallest(strides, sizes.get("n", 0)).items()}
    apart = {name: _word(each) for name, each in smallest.items() if each != _adjoining(name, words, sizes)}
    return CallKind(
        mode=mode,
        sizes=tuple(sizes.items()),
        dtypes=tuple(sorted(words.items())),
        strides=tuple(sorted(apart.items())),
        misaligned=tuple(sorted(slot.removesuffix(_POINTER) for slot in misaligned)),
        rows=ROWS[size],
    )


def strides_of_kind(kind: CallKind, slots: Collection[str]) -> dict[str, RowStride]:
    """Return the row strides of a kind for some slots."""
    names = {slot: slot.removesuffix(_STRIDE) for slot in slots}
    strides, dtypes = {name: _stride(word) for name, word in kind.strides}, dict(kind.dtypes)
    return {slot: strides.get(name, _adjoining(name, dtypes, kind.size)) for slot, name in names.items()}


def misaligned_of_kind(kind: CallKind) -> frozenset[str]:
    """Return the slots of a kind's misaligned pointers."""
    return frozenset(f"{name}{_POINTER}" for name in kind.misaligned)


def _adjoining(name: str, dtypes: Mapping[str, str], sizes: Mapping[str, int]) -> int:
    return sizes["n"] if name in dtypes else 0


def _smallest(strides: Mapping[str, RowStride], n: int) -> dict[str, RowStride]:
    """Return, for each stride, the smallest stride with the same compilation of kernels for rows of n elements."""
    smallest: dict[str, RowStride] = {
        slot: _walk(stride) if isinstance(stride, RowWalk) else _like(stride, n) for slot, stride in strides.items()
    }
    # Kernels for rows that start anywhere require that the strides of tensors are equal to that of x.
    of_x = smallest.get("x_row_stride")
    if not isinstance(of_x, int):
        return smallest
    unlike_x = {slot for slot, each in smallest.items() if each == of_x and strides[slot] != strides["x_row_stride"]}
    return {slot: of_x + MOST_ALIGNED if slot in unlike_x else each for slot, each in smallest.items()}


def _like(stride: int, n: int) -> int:
    """Return the smallest stride greater than n of the same alignment and type; n and 0 are returned unchanged."""
    if stride in (0, n):
        return stride
    alignment = row_alignment(stride)
    least = max(n, _WIDE if stride > LARGEST_I32 else 0) + 1
    smallest = -(-least // alignment) * alignment
    return smallest if row_alignment(smallest) == alignment else smallest + alignment


def _walk(walk: RowWalk) -> RowWalk:
    """Return a walk of as many strides, with sizes of 2, and with the same compilation of kernels."""
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
