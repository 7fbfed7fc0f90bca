"""The backward pass over row lengths, and over few rows, where the sums over rows weigh most."""

from __future__ import annotations

from itertools import product

from ..cells import Cell, Method, Norm, Suite, Task
from .shapes import sweep

_FEW_ROWS = tuple(Cell(Task.BACKWARD, norm, 4096, n, group="M = 4096") for norm, n in product(Norm, (1024, 2048, 4096)))

SUITE = Suite("backward", "Backward", Method.COLD, (*sweep(Task.BACKWARD), *_FEW_ROWS))
