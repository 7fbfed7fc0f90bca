"""Run cases: draw inputs, call normforge's public functions, and judge what came back; in one process or in several.

Cases that share kernels are run by one process, because compiling takes longest.
"""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.progress import progress_over

from .. import parts
from .calls import results
from .case import Case, Mode
from .draw import operands
from .judge import Finding, judge
from .suites import groups

# Larger inputs are not kept twice to see whether a call wrote to them.
_KEPT = 1 << 26
# Inputs of so many elements, and a backward pass of their tensors, are not held by two processes at once.
_LARGE = 1 << 27
# What a process may keep of the memory that a case took.
_KEPT_BYTES = 1 << 31


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


def run(case: Case, device: torch.device, seed: int) -> Outcome:
    """Run a case; an exception is caught and reported."""
    try:
        given = operands(case, device, seed)
        before = {name: tensor.clone() for name, tensor in given.items()} if case.rows * case.n <= _KEPT else {}
        findings = judge(case, given, results(case, given))
        if not all(torch.equal(given[name], tensor) for name, tensor in before.items()):
            findings.append(Finding("inputs as they were", math.inf, math.inf))
    except Exception as error:
        return Outcome(case.id, case.suite, case.mode, (), parts.told(error))
    return Outcome(case.id, case.suite, case.mode, tuple(findings))


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the GPU's memory, among all processes of this user."""
    with (Path(tempfile.gettempdir()) / f"normforge-conformance-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_group(group: Sequence[Case], device: torch.device, seed: int) -> Iterator[tuple[str, Outcome]]:
    """Run cases one after another, in this process; yield the name and the outcome of each."""
    for case in group:
        with _alone() if case.rows * case.n > _LARGE else nullcontext():
            outcome = run(case, device, seed)
            if device.type == "cuda" and torch.cuda.memory_reserved(device) > _KEPT_BYTES:
                torch.cuda.empty_cache()
        yield case.id, outcome


def run_in_processes(
    due: Sequence[Case], device: torch.device, seed: int, jobs: int
) -> Generator[tuple[str, Outcome], None, None]:
    """Run cases in `jobs` processes; outcomes come as they are there, one for each case."""
    work = partial(run_group, device=device, seed=seed)
    found = parts.in_processes(groups(due), work, jobs)
    yield from progress_over(found, what="conformance", unit="case", total=len(due))
