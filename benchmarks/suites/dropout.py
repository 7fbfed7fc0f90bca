"""A dropout, the residual add and the norm, beside the add and the norm alone."""

from __future__ import annotations

from itertools import product

from ..cells import Cell, Method, Norm, Suite, Task, rows_of
from .shapes import LARGE

_LENGTHS = (1024, 2048, 4096, 8192)

SUITE = Suite(
    "dropout",
    "Dropout, add and norm",
    Method.COLD,
    tuple(
        Cell(task, norm, rows_of(LARGE, n), n, group=group)
        for (task, group), norm, n in product(((Task.ADD, "add"), (Task.DROP_ADD, "dropout + add")), Norm, _LENGTHS)
    ),
)
