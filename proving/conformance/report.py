"""The results of a run: the full table, and its summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter, itemgetter

from ..evidence import Table, grouped, markdown, total
from .case import Mode
from .judge import Finding
from .run import Outcome
from .suites import SUITES

_COLUMNS = ("suite", *Mode._fields, "passed", "failed", "error", "output", "own", "own output")


def table(outcomes: Iterable[Outcome], header: Mapping[str, str]) -> Table:
    """Return the full table: a row per suite and mode, in the order of the suites, with the largest errors."""
    lines, order = grouped(outcomes, attrgetter("suite", "mode")), list(SUITES)
    rows = []
    for suite, mode in sorted(lines, key=lambda line: (order.index(line[0]), line[1])):
        of = lines[suite, mode]
        passed = sum(outcome.ok for outcome in of)
        findings = [finding for outcome in of for finding in outcome.findings]
        findings += [Finding("error", math.inf, math.inf) for outcome in of if outcome.error]
        worst = max(findings, key=attrgetter("units"), default=Finding("-", 0.0, 0.0))
        own = max(findings, key=attrgetter("own"), default=worst)
        errors = (f"{worst.units:.2g}", worst.output, f"{own.own:.2g}", own.output)
        rows.append((suite, *mode, passed, len(of) - passed, *errors))
    return Table.of(header, _COLUMNS, rows)


def summary(table: Table) -> str:
    """Return the section of the page: a row per suite, and the modes that failed."""
    passed, failed = total(table.rows, "passed"), total(table.rows, "failed")
    lines = [
        (
            suite,
            *(total(rows, name) for name in ("passed", "failed")),
            *(max(map(itemgetter(name), rows), key=float) for name in ("error", "own")),
        )
        for suite, rows in grouped(table.rows, itemgetter("suite")).items()
    ]
    columns = ("suite", "passed", "failed", "error", "by own tolerance")
    parts = [table.where, f"**{passed:,} of {passed + failed:,} cases pass.**", markdown(columns, lines)]
    failing = (row for row in table.rows if int(row["failed"]))
    parts += [f"- failed: {row['failed']} of {', '.join(list(row.values())[:6])}" for row in failing]
    return "\n\n".join(parts)
