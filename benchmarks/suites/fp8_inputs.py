"""Norms of fp8 rows, to bf16: as many rows as make y as large as in the suite `forward`."""

from __future__ import annotations

from itertools import product

from ..cells import Fp8Cell, Method, Norm, Suite, Task, rows_of
from .shapes import LARGE

_LENGTHS = (1024, 4096, 8192, 16384)
# Differences in a line of a kernel, at one length: the other dtype, with another conversion, and one scale for all.
_OTHERS = (("fp8_e5m2", False), ("fp8", True))

SUITE = Suite(
    "fp8-inputs",
    "fp8 inputs",
    Method.COLD,
    (
        *(
            Fp8Cell(Task.SCALED, norm, rows_of(LARGE, n), n, group="a scale a row")
            for norm, n in product(Norm, _LENGTHS)
        ),
        *(
            Fp8Cell(
                Task.SCALED,
                norm,
                rows_of(LARGE, 4096),
                4096,
                dtype,
                one_scale=one,
                group="one scale" if one else "a scale a row",
            )
            for norm, (dtype, one) in product(Norm, _OTHERS)
        ),
    ),
    sweeps=False,
)
