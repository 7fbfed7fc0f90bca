"""Gated norms: heads of linear attention, short rows by the hundred thousand, and Mamba2's groups of a long row."""

from __future__ import annotations

from ..cells import GatedCell, Method, Norm, Suite, Task
from .shapes import OTHER_DTYPES

_ROWS = 262144
# Mamba2's inner width and groups, of as many tokens as make x 128 MiB.
_TOKENS, _WIDE, _COLUMNS = 16384, 4096, 1024


def _cells(task: Task) -> tuple[GatedCell, ...]:
    part = "backward" if task is Task.GATED_BACKWARD else "forward"
    heads = tuple(GatedCell(task, Norm.RMS, _ROWS, n, group=part) for n in (64, 128, 256))
    return (
        *heads,
        GatedCell(task, Norm.LAYER, _ROWS, 128, group=part),
        GatedCell(task, Norm.RMS, _ROWS, 128, group=f"{part}, gate first", gate_first=True),
        GatedCell(task, Norm.RMS, _ROWS, 128, group=f"{part}, projected", projected=True),
        GatedCell(task, Norm.RMS, _TOKENS, _WIDE, group=f"{part}, groups", gate_first=True, columns=_COLUMNS),
        GatedCell(task, Norm.RMS, _TOKENS, _WIDE, group=f"{part}, gate first", gate_first=True),
        *(cell for dtype in OTHER_DTYPES for cell in _others(task, part, dtype)),
    )


def _others(task: Task, part: str, dtype: str) -> tuple[GatedCell, GatedCell]:
    # Other dtypes have the shapes of two kinds of models: a head of linear attention, and Mamba2's groups.
    return (
        GatedCell(task, Norm.RMS, _ROWS, 128, dtype, group=part),
        GatedCell(task, Norm.RMS, _TOKENS, _WIDE, dtype, group=f"{part}, groups", gate_first=True, columns=_COLUMNS),
    )


SUITE = Suite(
    "gated",
    "Gated norms",
    Method.COLD,
    (*_cells(Task.GATED), *_cells(Task.GATED_BACKWARD)),
    sweeps=False,
)
