"""Norms and rotary embedding of the q and k of few tokens, as in decoding, under CUDA graphs."""

from __future__ import annotations

from ..cells import Method, Suite, Task
from .rotary import cells

SUITE = Suite(
    "rotary-decode",
    "Norms of q and k with RoPE, decode, CUDA graph",
    Method.GRAPH,
    cells(Task.ROTARY, "forward", (1, 4, 16, 64)),
    along="m",
    unit="µs",
)
