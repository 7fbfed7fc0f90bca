"""Norms quantised as engines have it, of few rows, under CUDA graphs."""

from __future__ import annotations

from ..cells import Method, Suite
from .quantised import cells_of

_ROWS = (16, 64, 256)

SUITE = Suite(
    "quantised-decode",
    "Quantised as engines have it, few rows",
    Method.GRAPH,
    cells_of(_ROWS),
    along="m",
    unit="µs",
    sweeps=False,
)
