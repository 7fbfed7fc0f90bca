"""What batch invariance costs where rows are many: no kernel for odd rows, and none that spreads long ones."""

from __future__ import annotations

from itertools import product

from ..cells import Cell, Method, Norm, Suite, Task
from .batch_invariant import GROUPS

_LENGTHS = (128, 512, 1024, 2048, 4096, 4099, 5120, 8192, 16384, 65536)
_ROWS = (257, 4096)

_TASKS = ((Task.FORWARD, GROUPS[2]), (Task.ADD, GROUPS[3]), (Task.BACKWARD, GROUPS[5]))
_CELLS = tuple(
    Cell(task, norm, m, n, group=group) for (task, group), norm, n, m in product(_TASKS, Norm, _LENGTHS, _ROWS)
)
_QUANTISED = tuple(
    Cell(Task.ADD_QUANT, Norm.RMS, m, n, out_dtype="fp8", group=GROUPS[4])
    for n, m in product((2048, 4096, 5120, 7168, 8192), _ROWS)
)

SUITE = Suite("batch-invariant-many", "Batch invariance, many rows", Method.COLD, (*_CELLS, *_QUANTISED))
