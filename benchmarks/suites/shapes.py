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
# Beside bf16, which suites are of. fp16 has the tiles of bf16: two lengths show what its conversions cost. fp32 has its
# own where any were tuned, and the rule's elsewhere: a short row, one that is held, and one that is read twice.
OTHER_DTYPES = ("fp16", "fp32")
_OTHER_LENGTHS = {"fp16": (4096, 16384), "fp32": (1024, 4096, 16384)}


def sweep(task: Task) -> Iterator[Cell]:
    """Every length at every size of x, the odd lengths, an fp32 shape, and lengths of fp16 and fp32, in both norms."""
    for norm, size, n in product(Norm, SIZES, LENGTHS):
        yield Cell(task, norm, rows_of(size, n), n, group=f"{size} MiB")
    for norm, n in product(Norm, ODD_LENGTHS):
        yield Cell(task, norm, rows_of(LARGE, n), n, group="odd rows")
    for norm in Norm:
        yield Cell(task, norm, 2048, 8192, "fp32", group="fp32")
    for norm, dtype in product(Norm, OTHER_DTYPES):
        for n in _OTHER_LENGTHS[dtype]:
            yield Cell(task, norm, rows_of(LARGE, n, dtype), n, dtype, group=f"{LARGE} MiB")
