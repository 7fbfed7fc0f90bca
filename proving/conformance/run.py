"""Run one case: draw its inputs, call normforge's public functions, and judge all that came back."""

from __future__ import annotations

import math

import torch

from .calls import results
from .case import Case
from .draw import operands
from .judge import judge
from .outcome import Finding, Outcome

# Larger inputs are not kept twice to see whether a call wrote to them.
_KEPT = 1 << 26


def run(case: Case, device: torch.device, seed: int) -> Outcome:
    """Run a case; an exception is caught and reported."""
    try:
        findings = _findings(case, device, seed)
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        return Outcome(case.id, case.suite, case.mode, (), f"{type(error).__name__}: {lines[0]}")
    return Outcome(case.id, case.suite, case.mode, findings)


def _findings(case: Case, device: torch.device, seed: int) -> tuple[Finding, ...]:
    given = operands(case, device, seed)
    small = case.rows * case.n <= _KEPT
    before = {name: tensor.clone() for name, tensor in given.items()} if small else {}
    findings = judge(case, given, results(case, given))
    if all(torch.equal(given[name], tensor) for name, tensor in before.items()):
        return tuple(findings)
    return (*findings, Finding("inputs as they were", math.inf, math.inf))
