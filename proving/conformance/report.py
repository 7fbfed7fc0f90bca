"""The results of a run: as a file that runs can be merged from, as text, as CSV, and as a summary."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
        own: likewise, in units of our own.
        own_output: likewise.
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
        parts: which parts of the table were run: (part, parts).
        seconds: how long it took, all parts together.
    """

    header: dict[str, str]
    lines: dict[tuple[str, Mode], Line] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, outcome: Outcome) -> None:
        """Add a case."""
        key = (outcome.suite, outcome.mode)
        self.lines.setdefault(key, Line(*key)).count(outcome)
        if not outcome.ok:
            self.failures.append(str(outcome))

    @property
    def complete(self) -> bool:
        """Whether every part of the table was run."""
        return {part for part, _ in self.parts} == set(range(1, self.parts[0][1] + 1)) if self.parts else False

    def write(self, path: Path) -> None:
        """Write a file for `read`."""
        content = vars(self) | {"lines": [asdict(line) for line in self.lines.values()]}
        path.write_text(json.dumps(content, indent=1) + "\n")

    def summary(self) -> str:
        """A line a suite."""
        suites: dict[str, Line] = {}
        for line in self.lines.values():
            suites.setdefault(line.suite, Line(line.suite, _ALL)).merge(line)
        rows = [[line.suite, *_counts(line)] for line in suites.values()]
        return _table(["suite", *_COUNTS], rows)

    def details(self) -> str:
        """A line a suite and mode."""
        rows = [[line.suite, *asdict(line.mode).values(), *_counts(line)] for line in self.lines.values()]
        return _table(["suite", *asdict(_ALL), *_COUNTS], rows)

    def totals(self) -> str:
        """One sentence."""
        passed = sum(line.passed for line in self.lines.values())
        failed = sum(line.failed for line in self.lines.values())
        part = "" if self.complete else f" of part {', '.join(f'{part}/{parts}' for part, parts in self.parts)}"
        return f"{passed} of {passed + failed} cases{part} pass, in {self.seconds:.0f} s."

    def table(self) -> Table:
        """Return the full table: a row per suite and mode."""
        seconds = {"seconds": f"{self.seconds:.0f}"}
        parts = {} if self.complete else {"parts": ", ".join(f"{part}/{parts}" for part, parts in self.parts)}
        rows = [
            dict(zip(_COLUMNS, map(str, (line.suite, *asdict(line.mode).values(), *_counts(line))), strict=True))
            for line in self.lines.values()
        ]
        return Table({**self.header, **parts, **seconds}, _COLUMNS, rows)


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


def read(path: Path) -> Report:
    """A report that `Report.write` wrote."""
    content: Mapping[str, Any] = json.loads(path.read_text())
    lines = [Line(**line | {"mode": Mode(**line["mode"])}) for line in content["lines"]]
    return Report(
        dict(content["header"]),
        {(line.suite, line.mode): line for line in lines},
        list(content["failures"]),
        [(part, parts) for part, parts in content["parts"]],
        float(content["seconds"]),
    )


def merge(reports: Sequence[Report]) -> Report:
    """One report of several parts of the table.

    Raises:
        ValueError: they are not parts of one run: their headers differ, or a part is there twice.
    """
    whole = Report(reports[0].header)
    for report in reports:
        differing = [name for name in whole.header if report.header.get(name) != whole.header[name]]
        if differing:
            raise ValueError(f"{', '.join(differing)} of the parts differ; run them alike, or merge others")
        if set(report.parts) & set(whole.parts) or len({parts for _, parts in whole.parts + report.parts}) > 1:
            raise ValueError(f"parts {whole.parts} and {report.parts} overlap; merge each part of one slicing once")
        _add(whole, report)
    whole.lines = {key: whole.lines[key] for key in _in_order(whole.lines)}
    return whole


def _add(whole: Report, report: Report) -> None:
    for key, line in report.lines.items():
        whole.lines.setdefault(key, Line(*key)).merge(line)
    whole.failures += report.failures
    whole.parts += report.parts
    whole.seconds += report.seconds


def _in_order(keys: Iterable[tuple[str, Mode]]) -> list[tuple[str, Mode]]:
    from .table import SUITES

    order = list(SUITES)
    return sorted(keys, key=lambda key: (order.index(key[0]), key[1]))


def _counts(line: Line) -> list[object]:
    return [line.passed, line.failed, f"{line.units:.2g}", line.output, f"{line.own:.2g}", line.own_output]


def _table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
