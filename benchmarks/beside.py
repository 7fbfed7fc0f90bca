"""Two runs beside each other: the times that moved by more than the noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from . import tables
from .errors import UsageError
from .grids import Grid

# Columns of times, of which a table has one, and the columns that name what was timed.
_TIMES = ("us", "ms")
_NAMES = ("suite", "cell", "model", "dtype", "step", "run", "variant", "group", "part", "provider", "kernel", "way")
# Rows that no change of this project moves.
_TORCH = ("eager", "copy", "torch")

Rows = Mapping[tuple[str, ...], Mapping[str, str]]


class Change(NamedTuple):
    """One time before and now.

    Attributes:
        name: what was timed.
        old: its time before; None where it failed.
        new: its time now.
        relative: how much more it takes, beyond the table's drift.
        noise: the spread of both runs, as a share of the time.
    """

    name: tuple[str, ...]
    old: float | None
    new: float | None
    relative: float
    noise: float


class Comparison(NamedTuple):
    """A table of both runs.

    Attributes:
        name: the file's.
        drift: how much more the median row of torch's own takes; a slower machine moves all rows.
        changes: of the rows that both have.
        alone: how many rows only one of the two has.
    """

    name: str
    drift: float
    changes: list[Change]
    alone: int


def compare(old: Path, new: Path) -> list[Comparison]:
    """Compare the tables of times that two folders have.

    Raises:
        UsageError: they have no time in common.
    """
    found = [one for path in sorted(old.glob("*.csv")) if (one := _compared(path, new / path.name)) is not None]
    if not any(one.changes for one in found):
        raise UsageError(f"{old} and {new} have no time in common; name two folders that a verb wrote to with --out")
    return found


def moved(comparison: Comparison, within: float) -> list[Change]:
    """Return the changes of a table beyond its noise and a share, the largest first; a new failure is the largest."""
    far = [one for one in comparison.changes if abs(one.relative) > max(within, one.noise)]
    return sorted(far, key=lambda one: -abs(one.relative))


def describe(comparisons: list[Comparison], within: float) -> list[Grid]:
    """Return a table of the files, and a table of what moved."""
    files, far = [], []
    for one in comparisons:
        beyond = moved(one, within)
        alone = str(one.alone)
        files.append((one.name, str(len(one.changes)), alone, f"{one.drift:+.1%}", str(len(beyond))))
        for change in beyond:
            times = ("fails" if time is None else f"{time:.3f}" for time in (change.old, change.new))
            far.append(
                (f"{one.name}: {', '.join(change.name)}", *times, f"{change.relative:+.1%}", f"{change.noise:.1%}")
            )
    summary = Grid("", ("table", "times of both", "of one alone", "change of torch's", "moved"), files)
    return [summary, Grid("", ("moved", "old", "new", "beyond torch's", "noise"), far)] if far else [summary]


def _compared(old: Path, new: Path) -> Comparison | None:
    if not new.exists():
        return None
    before, now = _rows(old), _rows(new)
    common = [name for name in before if name in now]
    pairs = {name: (_time(before[name]), _time(now[name])) for name in common}
    ratios = {name: theirs / ours for name, (ours, theirs) in pairs.items() if ours and theirs}
    if not ratios:
        return None
    drift = median([ratio for name, ratio in ratios.items() if _is_torchs(name)] or ratios.values())
    return Comparison(
        old.stem,
        drift - 1,
        [
            _change(name, *pairs[name], drift, _noise(before[name]) + _noise(now[name]))
            for name in common
            if any(pairs[name])
        ],
        len(before.keys() ^ now.keys()),
    )


def _change(name: tuple[str, ...], old: float | None, new: float | None, drift: float, noise: float) -> Change:
    relative = new / old / drift - 1 if old and new else float("inf")
    return Change(name, old, new, relative, noise)


def _is_torchs(name: tuple[str, ...]) -> bool:
    return any(word in _TORCH or word.startswith("F.") for word in name)


def _rows(path: Path) -> Rows:
    _, _, rows = tables.parse(path.read_text())
    return {tuple(row[name] for name in _NAMES if row.get(name)): row for row in rows}


def _time(row: Mapping[str, str]) -> float | None:
    found = next((float(row[name]) for name in _TIMES if row.get(name)), 0.0)
    return found or None


def _noise(row: Mapping[str, str]) -> float:
    """Return half the span of the middle three fifths of the times, over the median."""
    time = _time(row)
    spans: Iterator[float] = (
        float(row[f"{name}_p80"]) - float(row[f"{name}_p20"]) for name in _TIMES if row.get(f"{name}_p80")
    )
    return next(spans, 0.0) / 2 / time if time else 0.0
