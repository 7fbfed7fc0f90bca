"""From what kernels are chosen by to a `CallKind`, and back; of strides, what compilations depend on and no more."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..call_kinds import ROWS, CallKind
from .key import LARGEST_I32
from .pipelines import MOST_ALIGNED, row_alignment
from .row_walk import RowStride, RowWalk

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
    found: dict[str, RowStride] = {}
    for slot, stride in strides.items():
        found[slot] = _walk(stride) if isinstance(stride, RowWalk) else _like(stride, n)
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
    strides, jumps = [_like(inner, 0)], []
    for size, nearer, further in zip(reversed(walk.sizes), reversed(walk.strides), outer, strict=False):
        jumps.append(abs(further - size * nearer))
    for further, jump in zip(outer, jumps, strict=True):
        past = -(-2 * strides[-1] // MOST_ALIGNED) * MOST_ALIGNED
        strides.append(past + row_alignment(further) + (2 * _WIDE if jump > LARGEST_I32 else 0))
    return RowWalk(tuple(reversed(strides)), (2,) * len(walk.sizes))


def _word(stride: RowStride) -> str:
    if not isinstance(stride, RowWalk):
        return str(stride)
    first, *others = stride.strides
    return "x".join(map(str, (first, *[each for pair in zip(stride.sizes, others, strict=True) for each in pair])))


def _stride(word: str) -> RowStride:
    parts = [int(part) for part in word.split("x")]
    return parts[0] if len(parts) == 1 else RowWalk(tuple(parts[::2]), tuple(parts[1::2]))
