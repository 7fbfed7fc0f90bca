"""Summary of a suite of drawn cells: a line per task, norm and class of rows, and the worst cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from tabulate import tabulate

from .cells import Task
from .providers import every_provider
from .reach import Finding, Rule, check, mean_of
from .results import Results
from .suites.sweep import MOST_SOME

_WORST = 5
_CLASSES = {False: f"to {MOST_SOME}", True: f"beyond {MOST_SOME}"}
_HEADS = (
    "task",
    "norm",
    "rows",
    "cells",
    "share of the copy's speed, mean",
    "lead over the best peer, mean",
    "least shares",
    "least leads",
)


def findings_of(results: Results) -> list[Finding]:
    """How every cell of a suite stands to the copy and to the best peer, by task, norm and shape."""
    found = check(Rule("every cell", results.suite), results).findings
    tasks = [task.value for task in Task]
    return sorted(found, key=lambda one: (tasks.index(one.row.task), one.row.kind, one.row.n, one.row.m))


def summary(results: Results) -> str:
    """Return a table of a suite's cells: their number, geometric means of two ratios, and the worst of each.

    Cells where this project fails are in no mean, and are counted beside the others; where every peer fails there is no
    lead.
    """
    classes: dict[tuple[str, str, bool], list[Finding]] = {}
    for finding in findings_of(results):
        row = finding.row
        classes.setdefault((row.task, row.kind, row.m > MOST_SOME), []).append(finding)
    lines = [(*_named(key), *_line(found)) for key, found in classes.items()]
    align = ("left", "left", "left", "right", "right", "right", "left", "left")
    return tabulate(lines, _HEADS, tablefmt="github", disable_numparse=True, colalign=align)


def _named(key: tuple[str, str, bool]) -> tuple[str, str, str]:
    task, kind, many = key
    return task.replace("_", " + "), kind, _CLASSES[many]


def _line(found: list[Finding]) -> tuple[str, ...]:
    failures = sum(not finding.row.ok for finding in found)
    return (
        f"{len(found)}{f', {failures} fail' if failures else ''}",
        _ratio(mean_of(finding.to_copy for finding in found)),
        _ratio(mean_of(finding.to_peer for finding in found)),
        _worst(found, lambda finding: finding.to_copy),
        _worst(found, lambda finding: finding.to_peer, peers=True),
    )


def _worst(found: Iterable[Finding], ratio: Callable[[Finding], float | None], *, peers: bool = False) -> str:
    known = [(value, finding) for finding in found if (value := ratio(finding)) is not None and math.isfinite(value)]
    known.sort(key=lambda pair: (pair[0], pair[1].row.cell))
    return ", ".join(_cell(value, finding, peers) for value, finding in known[:_WORST]) or "–"


def _cell(value: float, finding: Finding, peers: bool) -> str:
    beside = f" {every_provider()[finding.best_peer].label}" if peers else ""
    return f"{finding.row.m}×{finding.row.n} {value:.2f}{beside}"


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"
