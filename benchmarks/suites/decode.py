"""Few rows, as in decoding, under CUDA graphs."""

from __future__ import annotations

from itertools import product

from ..cells import Cell, Method, Norm, Suite, Task

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LENGTHS = (2048, 4096, 5120, 8192, 16384)

_PLAIN = tuple(Cell(Task.FORWARD, norm, m, n, group=f"N = {n}") for norm, n, m in product(Norm, _LENGTHS, _ROWS))
_FUSED = tuple(
    Cell(Task.ADD_QUANT, Norm.RMS, m, n, out_dtype="fp8", group=f"N = {n}, add + quant")
    for n, m in product((4096, 8192), (1, 16, 64, 256))
)

SUITE = Suite("decode", "Decode, CUDA graph", Method.GRAPH, (*_PLAIN, *_FUSED), along="m", unit="µs")
