"""The results of a run: the full table, and its summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, fields

from ..evidence import Table, markdown
from .case import Mode
from .judge import Finding
from .run import Outcome
from .suites import SUITES

_COLUMNS = (
    *("suite", *(field.name for field in fields(Mode))),
    *("passed", "failed", "error", "output", "own", "own output"),
)


def table(outcomes: Iterable[Outcome], header: Mapping[str, str]) -> Table:
    """Return the full table: a row per suite and mode, in the order of the suites, with the largest errors."""
    lines: dict[tuple[str, Mode], list[Outcome]] = {}
    for outcome in outcomes:
        lines.setdefault((outcome.suite, outcome.mode), []).append(outcome)
    order = list(SUITES)
    rows = []
    for suite, mode in sorted(lines, key=lambda line: (order.index(line[0]), line[1])):
        of = lines[suite, mode]
        passed = sum(outcome.ok for outcome in of)
        findings = [finding for outcome in of for finding in outcome.findings]
        findings += [Finding("error", math.inf, math.inf) for outcome in of if outcome.error]
        worst = max(findings, key=lambda finding: finding.units, default=Finding("-", 0.0, 0.0))
        own = max(findings, key=lambda finding: finding.own, default=worst)
        errors = (f"{worst.units:.2g}", worst.output, f"{own.own:.2g}", own.output)
        rows.append((suite, *astuple(mode), passed, len(of) - passed, *errors))
    return Table.of(header, _COLUMNS, rows)


def summary(table: Table) -> str:
    """Return the section of the page: a row per suite, and the modes that failed."""
    suites: dict[str, list[Mapping[str, str]]] = {}
    for row in table.rows:
        suites.setdefault(row["suite"], []).append(row)
    passed, failed = (sum(int(row[name]) for row in table.rows) for name in ("passed", "failed"))
    lines = [
        (
            suite,
            *(sum(int(row[name]) for row in rows) for name in ("passed", "failed")),
            *(max((row[name] for row in rows), key=float) for name in ("error", "own")),
        )
        for suite, rows in suites.items()
    ]
    columns = ("suite", "passed", "failed", "error", "by own tolerance")
    parts = [table.where, f"**{passed:,} of {passed + failed:,} cases pass.**", markdown(columns, lines)]
    failing = (row for row in table.rows if int(row["failed"]))
    parts += [f"- failed: {row['failed']} of {', '.join(list(row.values())[:6])}" for row in failing]
    return "\n\n".join(parts)
