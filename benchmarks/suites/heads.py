"""Norms of queries in a packed qkv, 32 of 48 heads: rows on two strides, beside rows that adjoin."""

from __future__ import annotations

from itertools import product

from ..cells import Cell, Method, Norm, Suite, Task
from .shapes import OTHER_DTYPES

_TOKENS, _HEADS = 8192, (32, 48)
_LENGTHS = (64, 128, 256)


def _cells(task: Task, heads: tuple[int, int], group: str) -> tuple[Cell, ...]:
    m = _TOKENS * _HEADS[0]
    # Other dtypes have the length of most models; both norms walk over two strides alike.
    kinds = (*product(Norm, _LENGTHS, ("bf16",)), *product((Norm.RMS,), (128,), OTHER_DTYPES))
    return tuple(Cell(task, norm, m, n, dtype, group=group, heads=heads) for norm, n, dtype in kinds)


SUITE = Suite(
    "heads",
    "Heads of a packed qkv",
    Method.COLD,
    (
        *_cells(Task.FORWARD, _HEADS, "forward, packed"),
        *_cells(Task.FORWARD, (0, 0), "forward, adjoining"),
        *_cells(Task.BACKWARD, _HEADS, "backward, packed"),
        *_cells(Task.BACKWARD, (0, 0), "backward, adjoining"),
    ),
)
