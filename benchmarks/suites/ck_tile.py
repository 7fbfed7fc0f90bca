"""The shapes that ck_tile's 02_layernorm2d example is timed on, by its script/perf_test.sh."""

from __future__ import annotations

from itertools import product

from ..cells import Cell, Method, Norm, Suite, Task

_ROWS = 700
_LENGTHS = (80, 128, 144, 168, 184, 256, 288, 344, 376, 448, 512, 924, 1024, 1078, 1996, 4080)

_CELLS = tuple(
    Cell(Task.FORWARD, Norm.LAYER, _ROWS, n, dtype, group=f"{_ROWS} rows, {dtype}")
    for dtype, n in product(("bf16", "fp16"), _LENGTHS)
)
# The list begins with a norm of one value.
_ONE = Cell(Task.FORWARD, Norm.LAYER, 1, 1, "bf16", group="one value")

# Microseconds each, so that a launch counts; its own timing too runs one call behind the other.
SUITE = Suite("ck_tile", "ck_tile's list of shapes, CUDA graph", Method.GRAPH, (_ONE, *_CELLS), unit="µs")
