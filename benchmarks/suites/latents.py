"""The norms of MLA's latents, quantised in groups of 128 columns, of few tokens, under CUDA graphs."""

from __future__ import annotations

from itertools import product

from ..cells import LatentsCell, Method, Norm, Suite, Task

_TOKENS = (1, 4, 16, 64, 128, 256)

SUITE = Suite(
    "latents",
    "Norms of MLA's latents, few tokens",
    Method.GRAPH,
    tuple(
        LatentsCell(Task.LATENTS, Norm.RMS, m, 1536, group=way, way=way)
        for way, m in product(("together", "apart", "alone"), _TOKENS)
    ),
    along="m",
    unit="µs",
)
