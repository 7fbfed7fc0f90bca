"""What a run found, as a file that runs can be merged from, as text, and as the page in docs/."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .case import Mode
from .outcome import Outcome

_PREFACE = """\
# Conformance

Read this to know how normforge does on other libraries' tests: the shapes, dtypes, inputs and tolerances that
established suites use for these operations, run through its public functions and held against an fp64 oracle.
`tests/conformance/` has the table of cases; `normforge` in it are cases that the other suites lack. Each output is held
twice: to the suite's tolerance, and to what one rounding and fp32 arithmetic explain (own). Errors are the largest of
any output of any case of the line, in units of what is allowed: up to 1 passes. `residual_out` is held to the bit.
Written by

    python -m tests.conformance --markdown docs/conformance.md
"""


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

    def markdown(self) -> str:
        """The page."""
        header = ", ".join(f"{name} {value}" for name, value in self.header.items())
        parts = [_PREFACE, f"Run on {header}.\n", f"{self.totals()}\n", f"{self.summary()}\n"]
        if self.failures:
            parts += ["## Failures\n", "\n".join(f"- {failure}" for failure in self.failures) + "\n"]
        return "\n".join([*parts, "## Every mode\n", f"{self.details()}\n"])


_ALL = Mode("-", "-", "-", "-", "-")
_COUNTS = ["passed", "failed", "largest error", "of", "own", "of "]


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
