"""Modulated norms of transformers for diffusion: 32 samples, before attention and behind a gated branch."""

from __future__ import annotations

from itertools import product

from ..cells import Method, ModulatedCell, Norm, Suite, Task
from .shapes import OTHER_DTYPES

# 1152 is DiT-XL's, 3072 Flux's.
_ROWS, _LENGTHS = 32768, (1152, 3072, 4096)


def _cells(task: Task, part: str) -> tuple[ModulatedCell, ...]:
    return (
        *(ModulatedCell(task, Norm.LAYER, _ROWS, n, group=part) for n in _LENGTHS),
        *(ModulatedCell(task, Norm.LAYER, _ROWS, n, group=f"{part}, gated", gated=True) for n in _LENGTHS),
        ModulatedCell(task, Norm.RMS, _ROWS, 3072, group=part),
        # Other dtypes have the length in the middle, before attention and behind a branch.
        *(
            ModulatedCell(task, Norm.LAYER, _ROWS, 3072, dtype, group=f"{part}, gated" if gated else part, gated=gated)
            for dtype, gated in product(OTHER_DTYPES, (False, True))
        ),
    )


SUITE = Suite(
    "modulated",
    "Modulated norms",
    Method.COLD,
    (*_cells(Task.MODULATED, "forward"), *_cells(Task.MODULATED_BACKWARD, "backward")),
    sweeps=False,
)
