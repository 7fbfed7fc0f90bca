"""The sweep of Triton's 05-layer-norm tutorial: M = 4096, fp16, N = 512 * i for i from 2 to 31."""

from __future__ import annotations

from itertools import product

from ..cells import Cell, Method, Norm, Suite, Task

# The tutorial's GB/s are 2 * x.numel() * x.element_size() forward and 3 * that backward: `Cell.bytes_moved`.
_CELLS = tuple(
    Cell(task, Norm.LAYER, 4096, 512 * i, "fp16", group=task.value)
    for task, i in product((Task.FORWARD, Task.BACKWARD), range(2, 32))
)

SUITE = Suite("tutorial", "Triton's layer-norm tutorial", Method.COLD, _CELLS)
