"""Holds a rerun against earlier results: by how much the ratios, which are what is claimed, have moved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tabulate import tabulate

from .errors import UsageError
from .reach import Finding, Rule, check
from .results import PROJECT, Results, load
from .suites import SUITES


@dataclass(frozen=True)
class Change:
    """One ratio of one cell, before and now.

    Attributes:
        cell: the cell's id.
        ratio: which one.
        old: its value before: None where it could not be taken, infinite where all peers fail.
        new: its value now.
        best_peer: the fastest peer before and now, for a ratio to it.
    """

    cell: str
    ratio: str
    old: float | None
    new: float | None
    best_peer: str = ""

    @property
    def relative(self) -> float:
        """How much has changed of the old value; infinite where only one of the two is there."""
        if self.old is None or self.new is None:
            return math.inf
        return 0.0 if self.old == self.new else self.new / self.old - 1


@dataclass(frozen=True)
class Comparison:
    """A suite in two folders.

    Attributes:
        suite: its name.
        changes: of every ratio that one of them has, in cells that both have.
        only_old: how many (cell, provider) pairs only the old results have; they count nowhere.
        only_new: cells of the new results alone.
        failing: cells where this project fails in both, so that there is no ratio.
        header: what differs between the headers, as `key old → new`.
    """

    suite: str
    changes: tuple[Change, ...]
    only_old: int
    only_new: int
    failing: tuple[str, ...]
    header: tuple[str, ...]


def compare(old: Results, new: Results) -> Comparison:
    """Hold a suite's results against earlier ones, by what was measured in both."""
    common = old.rows.keys() & new.rows.keys()
    before, now = (_findings(results, common) for results in (old, new))
    header = tuple(
        f"{key} {old.header.get(key, 'none')} → {new.header.get(key, 'none')}"
        for key in {**old.header, **new.header}
        if old.header.get(key) != new.header.get(key)
    )
    return Comparison(
        old.suite,
        tuple(change for cell in before for change in _changes(before[cell], now[cell])),
        len(old.rows.keys() - common),
        len(new.rows.keys() - common),
        tuple(cell for cell in before if not before[cell].row.ok and not now[cell].row.ok),
        header,
    )


def compare_folders(old: Path, new: Path) -> list[Comparison]:
    """Hold every suite that both folders hold against the other's.

    Raises:
        UsageError: they have no ratio in common.
    """
    comparisons = []
    for name in SUITES:
        before, now = load(old, name), load(new, name)
        known = before or now
        if known is not None:
            # A suite that only one folder has is left out, and the table says so.
            absent = Results(name, known.header)
            comparisons.append(compare(before or absent, now or absent))
    if not any(one.changes for one in comparisons):
        raise UsageError(
            f"{old} and {new} have no cell in common where {PROJECT} and a peer or the copy were timed; name two "
            "folders that `python -m benchmarks run --out` or `merge` wrote"
        )
    return comparisons


def describe(comparisons: Sequence[Comparison], within: float) -> str:
    """Return a table of the suites, what was left out, and the cells that moved further than `within`."""
    rows, beyond = [], []
    for one in comparisons:
        for ratio in dict.fromkeys(change.ratio for change in one.changes):
            changes = [change for change in one.changes if change.ratio == ratio]
            sizes = [abs(change.relative) for change in changes]
            inside = sum(size <= within for size in sizes) / len(sizes)
            rows.append((one.suite, ratio, len(sizes), _percent(median(sizes)), _percent(max(sizes)), f"{inside:.0%}"))
        beyond += [_line(one.suite, change) for change in one.changes if abs(change.relative) > within]
    heads = ("suite", "ratio", "cells", "median change", "largest change", f"within {_percent(within)}")
    parts = [tabulate(rows, heads, disable_numparse=True), *_notes(comparisons)]
    if beyond:
        columns = ("beyond it", "cell", "ratio", "old", "new", "change", "best peer")
        parts.append(tabulate(beyond, columns, disable_numparse=True))
    return "\n\n".join(parts)


def reproduced(comparisons: Sequence[Comparison], within: float) -> bool:
    """Return True if no ratio moved further."""
    return all(abs(change.relative) <= within for one in comparisons for change in one.changes)


def _findings(results: Results, common: set[tuple[str, str]]) -> dict[str, Finding]:
    kept = Results(results.suite, results.header, {key: row for key, row in results.rows.items() if key in common})
    return {finding.row.cell: finding for finding in check(Rule("every cell", results.suite), kept).findings}


def _changes(old: Finding, new: Finding) -> Iterator[Change]:
    cell = old.row.cell
    if (old.to_copy, new.to_copy) != (None, None):
        yield Change(cell, "to copy", old.to_copy, new.to_copy)
    if (old.to_peer, new.to_peer) != (None, None):
        peers = dict.fromkeys((old.best_peer or "none", new.best_peer or "none"))
        yield Change(cell, "to best peer", old.to_peer, new.to_peer, " → ".join(peers))


def _notes(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for one in comparisons:
        if one.header:
            yield f"{one.suite}: {', '.join(one.header)}"
        if one.only_old or one.only_new:
            yield f"{one.suite}: left out are {one.only_old} figures of the old results only, {one.only_new} of the new"
        if one.failing:
            yield f"{one.suite}: {PROJECT} fails in both on {', '.join(one.failing)}"


def _line(suite: str, change: Change) -> tuple[str, ...]:
    values = (_value(change.old), _value(change.new), _percent(change.relative, "+"))
    return (suite, change.cell, change.ratio, *values, change.best_peer)


def _percent(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.1f} %" if math.isfinite(share) else "∞"


def _value(ratio: float | None) -> str:
    if ratio is None:
        return "none"
    return f"{ratio:.3f}" if math.isfinite(ratio) else "∞"
