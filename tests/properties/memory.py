"""Tensors inside larger memory whose every other bit is known: what is read or written beside them shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Elements before and after, a multiple of every vector that a kernel moves.
_MARGIN = 256

# What memory is filled with, a byte at a time: NaN of every float type; of int8 -128, which no output holds.
_POISON = {torch.int8: 0x80, torch.float8_e4m3fnuz: 0x80}
_NAN = 0xFF

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Memory:
    """A tensor of some shape and strides inside poisoned memory, itself poisoned until it is filled.

    Attributes:
        view: the tensor.
    """

    def __init__(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        offset: int = 0,
        values: torch.Tensor | None = None,
        beside: int | None = None,
    ) -> None:
        """Make the tensor `offset` elements behind an aligned address, with `values` in it or poison.

        Args:
            shape: the tensor's.
            strides: its strides; along a dimension of stride 0, values are taken of the first place.
            dtype: its type.
            device: where it is.
            offset: elements between an aligned address and its first.
            values: what to fill it with.
            beside: elements from the tensor's first to that of another one like it, see `neighbour`.
        """
        self._beside = beside
        self._shape, self._strides, self._start = tuple(shape), tuple(strides), _MARGIN + offset
        reach = 0 if 0 in self._shape else sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        length = self._start + reach + (beside or 0) + _MARGIN
        self._bytes = torch.empty(length * dtype.itemsize, dtype=torch.uint8, device=device)
        self._memory = self._bytes.view(dtype)
        self._bits = self._bytes.view(_BITS[dtype.itemsize])
        self._before = torch.empty_like(self._bits)
        self._written: list[int] = []
        self.view = self._at(self._memory, self._start)
        self.fill(values)

    def fill(self, values: torch.Tensor | None) -> None:
        """Poison all memory anew, and put values into the tensor."""
        self._bytes.fill_(_POISON.get(self._memory.dtype, _NAN))
        if values is not None:
            places = tuple(
                min(n, 1) if stride == 0 else n for n, stride in zip(self._shape, self._strides, strict=True)
            )
            first = values[tuple(slice(size) for size in places)]
            self._memory.as_strided(places, self._strides, self._start).copy_(first)
        self._before.copy_(self._bits)

    def neighbour(self, dtype: torch.dtype) -> torch.Tensor:
        """Another tensor between this one's rows, which may be written."""
        assert self._beside is not None
        start = self._start + self._beside
        self._written.append(start)
        return self._at(self._memory.view(dtype), start)

    def may_be_written(self) -> torch.Tensor:
        """The tensor, as an output."""
        self._written.append(self._start)
        return self.view

    def check(self, name: str, *, refused: bool = False) -> None:
        """Look at every bit that nobody may have written: after a refused call, those of outputs too.

        Raises:
            AssertionError: one changed.
        """
        now = self._bits.clone()
        for start in () if refused else self._written:
            self._at(now, start).copy_(self._at(self._before, start))
        if not torch.equal(now, self._before):
            where = (now != self._before).nonzero().flatten() - self._start
            inside = "the tensor itself, or " if not self._written else ""
            raise AssertionError(
                f"{name}: {len(where)} elements were written of {inside}memory that is not the call's, the first at "
                f"{int(where[0])} and the last at {int(where[-1])} from the tensor's start (shape {self._shape}, "
                f"strides {self._strides})"
            )

    def _at(self, memory: torch.Tensor, start: int) -> torch.Tensor:
        return memory.as_strided(self._shape, self._strides, start)


def row_strides(leading: Sequence[int], row: int) -> tuple[int, ...]:
    """Strides of leading dimensions that collapse to one row stride; a dimension of size 1 has a stray one."""
    strides = []
    step = row
    for size in reversed(leading):
        strides.append(1 if size == 1 else step)
        step *= size
    return tuple(reversed(strides))
