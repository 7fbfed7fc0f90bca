"""Define the outcome of a case."""

from __future__ import annotations

from dataclasses import dataclass

from .case import Mode


@dataclass(frozen=True)
class Finding:
    """One output's largest error: in units of what the suite allows, and of what fp32 arithmetic and rounding explain.

    Attributes:
        output: its name.
        units: at most 1 passes.
        own: at most 1 passes.
    """

    output: str
    units: float
    own: float

    @property
    def ok(self) -> bool:
        """Return True if both rules hold."""
        return self.units <= 1 and self.own <= 1


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
        case: its id.
        suite: its suite.
        mode: the line of the report that it counts in.
        findings: one for each output.
        error: why there are none: what the call raised.
    """

    case: str
    suite: str
    mode: Mode
    findings: tuple[Finding, ...]
    error: str = ""

    @property
    def ok(self) -> bool:
        """Return True if every expected output came back and was right."""
        return not self.error and all(finding.ok for finding in self.findings)

    def __str__(self) -> str:
        wrong = [f"{f.output} {f.units:.3g} (own {f.own:.3g})" for f in self.findings if not f.ok]
        return f"{self.case}: {self.error or ', '.join(wrong) or 'passed'}"
