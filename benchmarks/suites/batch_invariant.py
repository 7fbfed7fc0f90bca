"""What batch invariance costs where rows are few, under CUDA graphs: its tile is for many rows."""

from __future__ import annotations

from itertools import product

from ..cells import Cell, Method, Norm, Suite, Task

_ROWS = (1, 16, 64, 256)
_LENGTHS = (128, 1024, 2048, 4096, 4097, 5120, 8192, 16384, 65536)

# The groups of this suite and of `batch_invariant_many`, which are all that the provider is for.
GROUPS = tuple(
    f"batch invariance, {what}"
    for what in ("decode", "decode, add + quant", "many rows", "many rows, add", "many rows, add + quant", "gradient")
)

_PLAIN = tuple(Cell(Task.FORWARD, norm, m, n, group=GROUPS[0]) for norm, n, m in product(Norm, _LENGTHS, _ROWS))
_FUSED = tuple(
    Cell(Task.ADD_QUANT, Norm.RMS, m, n, out_dtype="fp8", group=GROUPS[1])
    for n, m in product((2048, 4096, 5120, 7168, 8192), _ROWS)
)

SUITE = Suite("batch-invariant", "Batch invariance, few rows", Method.GRAPH, (*_PLAIN, *_FUSED), along="m", unit="µs")
