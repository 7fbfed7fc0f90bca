"""A dropout, the residual add and the norm, beside the add and the norm alone."""

from __future__ import annotations

from itertools import product

from ..cells import Cell, Method, Norm, Suite, Task, rows_of
from .shapes import LARGE, OTHER_DTYPES

_LENGTHS = (1024, 2048, 4096, 8192)
_TASKS = ((Task.ADD, "add"), (Task.DROP_ADD, "dropout + add"))
# Other dtypes have rows of several in a program and rows that a program holds; RMSNorm loads as LayerNorm does.
_OTHERS = ((Norm.LAYER, 1024), (Norm.LAYER, 4096), (Norm.RMS, 4096))

SUITE = Suite(
    "dropout",
    "Dropout, add and norm",
    Method.COLD,
    (
        *(
            Cell(task, norm, rows_of(LARGE, n), n, group=group)
            for (task, group), norm, n in product(_TASKS, Norm, _LENGTHS)
        ),
        *(
            Cell(task, norm, rows_of(LARGE, n, dtype), n, dtype, group=group)
            for (task, group), dtype, (norm, n) in product(_TASKS, OTHER_DTYPES, _OTHERS)
        ),
    ),
)
