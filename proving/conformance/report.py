"""The results of a run: as text, as CSV, and as a summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tabulate import tabulate

from ..evidence import Table, markdown
from .case import Mode
from .outcome import Outcome


@dataclass
class Line:
    """A suite's cases of one mode.

    Attributes:
        suite: its name.
        mode: the mode.
        passed: how many cases passed.
        failed: how many did not.
        units: the largest error in units of the suite's tolerance.
        output: of which output.
        own: the largest error in units of our own.
        own_output: of which output.
    """

    suite: str
    mode: Mode
    passed: int = 0
    failed: int = 0
    units: float = 0.0
    output: str = "-"
    own: float = 0.0
    own_output: str = "-"

    def count(self, outcome: Outcome) -> None:
        """Add a case."""
        self.passed += outcome.ok
        self.failed += not outcome.ok
        for finding in outcome.findings:
            self._raise(finding.units, finding.output, finding.own, finding.output)
        if outcome.error:
            self._raise(math.inf, "error", math.inf, "error")

    def merge(self, other: Line) -> None:
        """Add another run's cases of the same line."""
        self.passed += other.passed
        self.failed += other.failed
        self._raise(other.units, other.output, other.own, other.own_output)

    def _raise(self, units: float, output: str, own: float, own_output: str) -> None:
        if units > self.units:
            self.units, self.output = units, output
        if own > self.own:
            self.own, self.own_output = own, own_output


@dataclass
class Report:
    """All that a run found.

    Attributes:
        header: device, versions, revision and seed.
        lines: by suite and mode, in the order of the table.
        failures: a sentence for each case that failed.
        seconds: how long it took, all parts together.
    """

    header: dict[str, str]
    lines: dict[tuple[str, Mode], Line] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(cls, header: Mapping[str, str], outcomes: Iterable[Outcome], seconds: float) -> Report:
        """Return the report of some outcomes, lines in the order of the table of suites."""
        found = cls(dict(header), seconds=seconds)
        for outcome in outcomes:
            found.count(outcome)
        found.lines = {key: found.lines[key] for key in _in_order(found.lines)}
        return found

    def count(self, outcome: Outcome) -> None:
        """Add a case."""
        key = (outcome.suite, outcome.mode)
        self.lines.setdefault(key, Line(*key)).count(outcome)
        if not outcome.ok:
            self.failures.append(str(outcome))

    def summary(self) -> str:
        """Return a line per suite."""
        suites: dict[str, Line] = {}
        for line in self.lines.values():
            suites.setdefault(line.suite, Line(line.suite, _ALL)).merge(line)
        rows = [[line.suite, *_counts(line)] for line in suites.values()]
        return _table(["suite", *_COUNTS], rows)

    def details(self) -> str:
        """Return a line per suite and mode."""
        rows = [[line.suite, *asdict(line.mode).values(), *_counts(line)] for line in self.lines.values()]
        return _table(["suite", *asdict(_ALL), *_COUNTS], rows)

    def totals(self) -> str:
        """One sentence."""
        passed = sum(line.passed for line in self.lines.values())
        failed = sum(line.failed for line in self.lines.values())
        return f"{passed} of {passed + failed} cases pass, in {self.seconds:.0f} s."

    def table(self) -> Table:
        """Return the full table: a row per suite and mode."""
        seconds = {"seconds": f"{self.seconds:.0f}"}
        rows = [
            dict(zip(_COLUMNS, map(str, (line.suite, *asdict(line.mode).values(), *_counts(line))), strict=True))
            for line in self.lines.values()
        ]
        return Table({**self.header, **seconds}, _COLUMNS, rows)


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


_ALL = Mode("-", "-", "-", "-", "-")
_COUNTS = ["passed", "failed", "largest error", "of", "own", "of "]
_COLUMNS = ("suite", *asdict(_ALL), "passed", "failed", "error", "output", "own", "own output")


def _in_order(keys: Iterable[tuple[str, Mode]]) -> list[tuple[str, Mode]]:
    from .table import SUITES

    order = list(SUITES)
    return sorted(keys, key=lambda key: (order.index(key[0]), key[1]))


def _counts(line: Line) -> list[object]:
    return [line.passed, line.failed, f"{line.units:.2g}", line.output, f"{line.own:.2g}", line.own_output]


def _table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
