"""The accuracy table, as CSV and as a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from normforge.codegen.values import Norm

from ..evidence import Table, grouped, markdown, total
from .measure import Cell
from .rows import KINDS
from .units import MOST

_DIRECTIONS = {"fwd": "Forward", "bwd": "Backward"}
_NORMS = {norm.prefix: norm.row.title for norm in Norm} | {"gn": "GroupNorm"}


# The cells of a case, or why it did not run.
Result = list[Cell] | str


@dataclass(frozen=True)
class Outcome:
    """The findings of a run.

    Attributes:
        cells: everything that was measured.
        broken: cases that did not run, and why.
    """

    cells: Sequence[Cell]
    broken: Sequence[str]

    @property
    def failing(self) -> list[Cell]:
        """The cells where ours is more than the rule allows, the worst first."""
        return sorted((cell for cell in self.cells if not cell.ok), key=lambda cell: -cell.ratio)

    @property
    def ok(self) -> bool:
        """Return True if the rule holds, in every cell and in most."""
        most = 2 * sum(cell.ratio <= 1 for cell in self.cells) > len(self.cells)
        return most and not self.broken and not self.failing


def outcome_of(found: Mapping[str, Result]) -> Outcome:
    """Return the outcome of the results of cases, by name."""
    return Outcome(
        [cell for result in found.values() if not isinstance(result, str) for cell in result],
        [f"{name}: {result}" for name, result in found.items() if isinstance(result, str)],
    )


def table(outcome: Outcome, header: Mapping[str, str]) -> Table:
    """Return the full table: a row per pipeline, direction, dtype and output, with the largest errors per kind."""
    columns = [*_COLUMNS, *(name for kind in KINDS for name in (kind, f"{kind} torch"))]
    rows = []
    for key, cells in grouped(outcome.cells, _key).items():
        worst = _worst(cells)
        errors = (worst.ours.largest, worst.torch.largest, worst.ours.rms, worst.torch.rms, worst.ratio)
        counts = (len(cells), sum(not cell.ok for cell in cells), sum(cell.ratio <= 1 for cell in cells))
        row = dict(
            zip(_COLUMNS, (*key, *map(str, counts), worst.kind, str(worst.n), *map(_number, errors)), strict=True)
        )
        for kind, some in grouped(cells, attrgetter("kind")).items():
            largest = _worst(some)
            row |= {kind: _number(largest.ours.largest), f"{kind} torch": _number(largest.torch.largest)}
        rows.append(row)
    broken = {"did not run": "; ".join(outcome.broken)} if outcome.broken else {}
    return Table({**header, **broken}, columns, rows)


def summary(table: Table) -> str:
    """Return the section of the page: the verdict, the largest errors by output, and where they are."""
    cells, beyond, no_worse = (total(table.rows, name) for name in ("cells", "beyond", "no worse"))
    rows = []
    for (direction, output), some in grouped(table.rows, itemgetter("direction", "output")).items():
        counts = (total(some, name) for name in ("cells", "no worse"))
        worst = max(some, key=lambda row: float(row["times torch"]))
        place = f"{worst['pipeline']}, {worst['norm']}, {worst['dtype']}, {worst['worst rows']} of N = {worst['n']}"
        rows.append((direction, output, *counts, worst["times torch"], place))
    parts = [
        table.where,
        f"**{cells - beyond:,} of {cells:,} cells are within {MOST:.0f} times torch's error, and {no_worse:,} are at "
        "most torch's.**",
        markdown(("direction", "output", "cells", "no worse", "at most, times torch's", "there"), rows),
    ]
    parts += [
        f"The rule does not hold in {row['beyond']} cells of {' '.join(row[name] for name in _COLUMNS[:5])}: "
        f"{row['largest']} units, torch {row['largest torch']}."
        for row in table.rows
        if int(row["beyond"])
    ]
    return "\n\n".join(parts)


_COLUMNS = (
    *("direction", "pipeline", "norm", "dtype", "output", "cells", "beyond", "no worse", "worst rows", "n"),
    *("largest", "largest torch", "rms", "rms torch", "times torch"),
)


def _key(cell: Cell) -> tuple[str, ...]:
    norm = _NORMS[cell.mode.partition("_")[0]]
    return _DIRECTIONS[cell.direction], cell.pipeline, norm, cell.dtypes, cell.output


def _worst(cells: Sequence[Cell]) -> Cell:
    return max(cells, key=lambda cell: (cell.ratio, cell.ours.largest))


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1 else f"{value:.1f}" if value < 1000 else f"{value:.0e}"
