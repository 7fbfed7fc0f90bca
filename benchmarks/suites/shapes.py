"""Shapes that several suites share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ..cells import Cell, Norm, Task, rows_of

LENGTHS = (
    *(256, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384),
    *(32768, 65536, 131072, 262144),
)
ODD_LENGTHS = (1000, 4099, 5137)
SIZES = (256, 64)
LARGE = SIZES[0]


def sweep(task: Task) -> Iterator[Cell]:
    """Every length at every size of x, the odd lengths, and an fp32 shape, in both norms."""
    for norm, size, n in product(Norm, SIZES, LENGTHS):
        yield Cell(task, norm, rows_of(size, n), n, group=f"{size} MiB")
    for norm, n in product(Norm, ODD_LENGTHS):
        yield Cell(task, norm, rows_of(LARGE, n), n, group="odd rows")
    for norm in Norm:
        yield Cell(task, norm, 2048, 8192, "fp32", group="fp32")
