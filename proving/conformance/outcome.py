"""Define the outcome of a case, and the book in which its outputs' errors are kept while it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .case import Mode
from .judge import Tally


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


class Book:
    """Two tallies for each output: the suite's and our own."""

    def __init__(self) -> None:
        self._tallies: dict[str, tuple[Tally, Tally]] = {}
        self._missing: dict[str, None] = {}

    def expects(self, name: str, tensor: torch.Tensor | None, like: tuple[tuple[int, ...], torch.dtype] | None) -> bool:
        """Return True if an output is there, of the expected shape and dtype; if not, its error is infinite."""
        found = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        if found != like:
            self._missing[name] = None
        return found is not None and found == like

    def open(self, name: str, suite: Tally, own: Tally | None = None) -> None:
        """Keep an output's tallies; what has one is held to the same by both."""
        self._tallies[name] = (suite, own or suite)

    def findings(self) -> tuple[Finding, ...]:
        """Read every tally, which waits for the GPU."""
        pairs = [(suite.units(), own.units()) for suite, own in self._tallies.values()]
        units = torch.stack([number for pair in pairs for number in pair]).tolist() if pairs else []
        found = [Finding(name, *units[2 * i : 2 * i + 2]) for i, name in enumerate(self._tallies)]
        absent = [Finding(f"{name} (missing, or another shape or dtype)", math.inf, math.inf) for name in self._missing]
        return (*found, *absent)
