"""Runs one case: draws its inputs, calls normforge's public functions, and has the judge look at all that came back."""

from __future__ import annotations

import torch

from . import backward, beside, forward
from .case import Case
from .draw import operands
from .judge import ExactTally
from .outcome import Book, Finding, Outcome

# Larger inputs are not kept twice to see whether a call wrote to them.
_KEPT = 1 << 26


def run(case: Case, device: torch.device, seed: int) -> Outcome:
    """Run a case; what it raises is caught and told."""
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
    book = Book()
    if case.is_beside:
        beside.judge(case, given, book)
    elif case.arriving:
        backward.judge(case, given, book)
    else:
        forward.judge(case, given, forward.call(case, given), book)
    if before:
        untouched = ExactTally(device)
        for name, tensor in before.items():
            untouched.add(given[name], tensor)
        book.open("inputs as they were", untouched)
    return book.findings()
