"""The accuracy table, for a terminal and as the committed document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from .measure import Cell
from .rows import KINDS
from .units import MOST, RULE, UNIT

_DIRECTIONS = {"fwd": "Forward", "bwd": "Backward"}
_NORMS = {"ln": "LayerNorm", "rms": "RMSNorm", "gn": "GroupNorm"}


@dataclass(frozen=True)
class Outcome:
    """What a run found.

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
    def no_worse(self) -> int:
        """In how many cells ours is at most torch's."""
        return sum(cell.ratio <= 1 for cell in self.cells)

    @property
    def ok(self) -> bool:
        """Whether the rule holds, in every cell and in most."""
        return bool(self.cells) and not self.broken and not self.failing and 2 * self.no_worse > len(self.cells)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.cells:
            return "Nothing was measured."
        found = (
            f"{len(self.cells) - len(self.failing)} of {len(self.cells)} cells are within {MOST:.0f} times torch's "
            f"error, and {self.no_worse} are at most torch's"
        )
        return f"{found}; {len(self.broken)} cases did not run." if self.broken else f"{found}."


def text(outcome: Outcome) -> str:
    """What the command prints: the table, what fails, and the verdict."""
    lines = [_table(outcome.cells, "simple"), ""]
    if outcome.failing:
        lines += [_failing(outcome.failing, "simple"), ""]
    lines += [f"did not run: {case}" for case in outcome.broken]
    return "\n".join((*lines, outcome.verdict))


def markdown(outcome: Outcome, header: Mapping[str, str], command: str) -> str:
    """The document."""
    kinds = tabulate([(name, kind.means) for name, kind in KINDS.items()], ("rows", "values"), "github")
    lengths = sorted({cell.n for cell in outcome.cells})
    parts = [
        "# Accuracy",
        "Read this to know how far each kernel is from fp64, beside torch's own operator on the same rows. "
        f"`{command}` measures it and writes this file.",
        "Measured on " + ", ".join(f"{name} {value}" for name, value in header.items()) + ".",
        f"**{outcome.verdict}**",
        "## What is compared",
        "Each pipeline computes the same rows as torch: `layer_norm` and `rms_norm`'s own operators, with operands of "
        "x's type. Where ours writes fp32 of 16-bit rows, adds a residual or quantises, torch is given the operands in "
        "fp32, and its fp32 result is rounded once. There is a weight near 1, and a bias only where a residual is "
        "added: beside a bias, errors of small values do not show. eps is 1e-5. Backward, both are given the same mean "
        "and rstd, those of fp64 in fp32. For each pipeline and type the worst of all row lengths is shown, of "
        f"N = {lengths[0]:,} to {lengths[-1]:,}" + ", with tiles for few rows and for many."
        if lengths
        else "",
        "`head` stands behind pipelines whose pivot is the mean of a row's first eight values; `row_terms` belongs to "
        "the backward `two_pass`.",
        "`rounded first` are rows that are rounded before the weight (`cast`), torch's likewise: its operator without "
        "a weight in fp32, rounded and multiplied. `heads` are two of four in a packed tensor, whose rows are on two "
        "strides, NaN beside them; `in place`, y is written over them.",
        "With `dropout` torch is given what is kept, doubled. `gate` is act(z) behind the norm, or before it, torch's "
        "composed of its operators in fp32; so is GroupNorm with SiLU, whose rows are groups of 1, 2, 4 or 8 channels.",
        kinds,
        "## The unit",
        UNIT,
        "## The rule",
        RULE,
        "## Errors",
        "Largest error and root mean square, in units: of all kinds of rows and all N, of the cell where ours is "
        "furthest above torch's by the rule; and how many cells are no worse than torch's.",
        _table(outcome.cells, "github"),
        *_by_kind(outcome.cells),
    ]
    if outcome.failing:
        parts += ["## Where the rule does not hold", _failing(outcome.failing, "github")]
    if outcome.broken:
        parts += ["## What did not run", "\n".join(f"- {case}" for case in outcome.broken)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(cells: Iterable[Cell], style: str) -> str:
    """A line for each pipeline, direction, dtype and output."""
    rows = []
    for key, some in _grouped(cells, _key).items():
        worst = _worst(some)
        rows.append(
            (
                *key,
                worst.kind,
                f"{worst.n}",
                _number(worst.ours.largest),
                _number(worst.torch.largest),
                _number(worst.ours.rms),
                _number(worst.torch.rms),
                f"{_number(worst.ratio)}{'' if worst.ok else ' !'}",
                f"{sum(cell.ratio <= 1 for cell in some)}/{len(some)}",
            )
        )
    names = ("direction", "pipeline", "norm", "dtype", "output", "worst rows", "N")
    measures = ("largest", "torch's", "rms", "torch's", "times torch's", "no worse")
    return tabulate(rows, (*names, *measures), style, disable_numparse=True)


def _by_kind(cells: Iterable[Cell]) -> list[str]:
    """For each direction and pipeline, the largest errors by kind of rows."""
    parts = ["### By kind of rows", "Largest error in units, ours / torch's; bold where the rule does not hold."]
    for (direction, pipeline), some in _grouped(cells, lambda cell: _key(cell)[:2]).items():
        rows = []
        for key, same in _grouped(some, lambda cell: _key(cell)[2:]).items():
            by_kind = _grouped(same, lambda cell: (cell.kind,))
            rows.append((*key, *(_pair(by_kind.get((kind,))) for kind in KINDS)))
        table = tabulate(rows, ("norm", "dtype", "output", *KINDS), "github", disable_numparse=True)
        parts += [f"#### {direction} {pipeline}", table]
    return parts


def _pair(cells: Sequence[Cell] | None) -> str:
    if not cells:
        return "–"
    worst = _worst(cells)
    pair = f"{_number(worst.ours.largest)} / {_number(worst.torch.largest)}"
    return pair if worst.ok else f"**{pair}**"


def _failing(cells: Iterable[Cell], style: str) -> str:
    rows = [
        (
            cell.pipeline,
            cell.mode,
            cell.n,
            cell.tile,
            cell.kind,
            cell.output,
            *(f"{_number(e.largest)}, rms {_number(e.rms)}" for e in (cell.ours, cell.torch)),
            _number(cell.ratio),
        )
        for cell in cells
    ]
    names = ("pipeline", "mode", "N", "tile", "rows", "output", "ours", "torch's", "times")
    return tabulate(rows, names, style, disable_numparse=True)


def _key(cell: Cell) -> tuple[str, ...]:
    norm = _NORMS[cell.mode.partition("_")[0]]
    return _DIRECTIONS[cell.direction], cell.pipeline, norm, cell.dtypes, cell.output


def _grouped(cells: Iterable[Cell], key: Callable[[Cell], tuple[str, ...]]) -> dict[tuple[str, ...], list[Cell]]:
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return groups


def _worst(cells: Sequence[Cell]) -> Cell:
    return max(cells, key=lambda cell: (cell.ratio, cell.ours.largest))


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1 else f"{value:.1f}" if value < 1000 else f"{value:.0e}"
