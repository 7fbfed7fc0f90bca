"""Few rows, as in decoding, under CUDA graphs."""

from __future__ import annotations

from itertools import product

from ..cells import Cell, Method, Norm, Suite, Task
from .shapes import OTHER_DTYPES

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LENGTHS = (2048, 4096, 5120, 8192, 16384)

_PLAIN = tuple(Cell(Task.FORWARD, norm, m, n, group=f"N = {n}") for norm, n, m in product(Norm, _LENGTHS, _ROWS))
_FUSED = tuple(
    Cell(Task.ADD_QUANT, Norm.RMS, m, n, out_dtype="fp8", group=f"N = {n}, add + quant")
    for n, m in product((4096, 8192), (1, 16, 64, 256))
)
# With so few rows a launch takes longer than reading, whatever the dtype: one length, from one row to the most.
_OTHERS = tuple(
    Cell(Task.FORWARD, norm, m, 4096, dtype, group="N = 4096")
    for norm, dtype, m in product(Norm, OTHER_DTYPES, (1, 16, 256))
)

SUITE = Suite("decode", "Decode, CUDA graph", Method.GRAPH, (*_PLAIN, *_FUSED, *_OTHERS), along="m", unit="µs")
