"""A norm, the residual add and the next norm, as in Gemma 2 and OLMo 2: many rows, and the few of a decode step."""

from __future__ import annotations

from itertools import product

from ..cells import Cell, Method, Norm, Suite, Task

# 3584 and 5376 are widths of Gemma 2 and Gemma 3.
_LENGTHS, _ROWS = (2048, 3584, 5376), (16, 4096, 16384)

SUITE = Suite(
    "renormed",
    "Two norms around an add",
    Method.COLD,
    tuple(
        Cell(task, norm, m, n, group=f"{part}, M = {m}")
        for (task, part), norm, m, n in product(
            ((Task.RENORMED, "forward"), (Task.RENORMED_BACKWARD, "backward")), Norm, _ROWS, _LENGTHS
        )
    ),
    sweeps=False,
)
