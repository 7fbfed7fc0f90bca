"""Shapes for the steps from Triton's tutorial to an emitted kernel: `docs/tutorials/from_tutorial.md`."""

from __future__ import annotations

from ..cells import Cell, Method, Norm, Suite, Task, rows_of
from .shapes import LARGE

GROUPS = ("steps, forward", "steps, backward")

# Rows of a power of two, of none, and those whose stride Triton does not see to be a multiple of 16 bytes.
_LENGTHS = {Task.FORWARD: (1000, 1024, 4096, 5120), Task.BACKWARD: (1024, 4096, 5120)}

SUITE = Suite(
    "steps",
    "From Triton's tutorial to an emitted kernel",
    Method.COLD,
    tuple(
        Cell(task, Norm.LAYER, rows_of(LARGE, n), n, group=group)
        for group, (task, lengths) in zip(GROUPS, _LENGTHS.items(), strict=True)
        for n in lengths
    ),
    sweeps=False,
)
