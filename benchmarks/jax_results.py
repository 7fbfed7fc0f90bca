"""Timed norms called from JAX, and their table as results, which are compared with goals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .cells import Cell, Norm, Task
from .errors import UsageError
from .results import OK, Results, load_rows, make_row
from .timing import Spread

SUITE = "jax"


@dataclass(frozen=True)
class Case:
    """LayerNorm of some rows, with or without its gradients."""

    m: int
    n: int
    dtype: str
    trains: bool

    @property
    def cell(self) -> Cell:
        """The case as a suite would have it."""
        return Cell(
            Task.GRAD_BOTH if self.trains else Task.FORWARD, Norm.LAYER, self.m, self.n, self.dtype, group=SUITE
        )

    def __str__(self) -> str:
        return f"LayerNorm {self.m}x{self.n} {self.dtype}{', gradients of all' if self.trains else ''}"


CASES = tuple(
    Case(*shape, trains) for shape in ((2048, 8192, "fp32"), (32768, 4096, "bf16")) for trains in (False, True)
)


@dataclass(frozen=True)
class Row:
    """The time of a case one way.

    Attributes:
        case: which.
        way: "torch" and "jax" for the kernels, by who called them, or "xla" for the formula.
        us: what a call's kernels took together, the median of the calls, in microseconds.
        us_p20: the 20th percentile.
        us_p80: the 80th.
        runs: calls.
        kernels: their names, in order.
    """

    case: str
    way: str
    us: float
    us_p20: float
    us_p80: float
    runs: int
    kernels: str


def load(folder: Path) -> Results | None:
    """Read what the verb `jax` wrote, with the ways for providers; None where there is no file.

    Raises:
        UsageError: the file lacks a column, or has a case that is no longer timed.
    """
    found = load_rows(folder, SUITE, Row)
    if found is None:
        return None
    header, rows = found
    made, cases = Results(SUITE, header), {str(case): case for case in CASES}
    for row in rows:
        if row.case not in cases:
            raise UsageError(
                f"{folder / SUITE}.csv has a case {row.case!r}, which is no longer timed; measure it again with "
                "`python -m benchmarks jax`"
            )
        made.add(make_row(cases[row.case].cell, row.way, OK, Spread(row.us, row.us_p20, row.us_p80, row.runs)))
    return made
