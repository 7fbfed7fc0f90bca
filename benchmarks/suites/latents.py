"""The norms of MLA's latents, quantised in groups of 128 columns, of few tokens, under CUDA graphs."""

from __future__ import annotations

from itertools import product

from ..cells import Method, Norm, QuantisedCell, Suite, Task

_TOKENS = (1, 4, 16, 64, 128, 256)

SUITE = Suite(
    "latents",
    "Norms of MLA's latents, few tokens",
    Method.GRAPH,
    tuple(
        QuantisedCell(Task.LATENTS, Norm.RMS, m, 1536, group=way, columns=128, way=way, kv_columns=512)
        for way, m in product(("together", "apart", "alone"), _TOKENS)
    ),
    along="m",
    unit="µs",
)
