"""`python -m proving conformance`: every case on a GPU, or a slice in Triton's interpreter, as a table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from normforge.tools.machine import Machine

from ..evidence import conclude, parser_of
from ..measured import measured
from . import report
from .case import Case
from .run import run_in_processes
from .suites import cases, interpreted


def _named(machine: Machine) -> Mapping[str, Case]:
    return {case.id: case for case in (interpreted() if machine.interpreted else cases())}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked; 0 if every case passed, 1 if one failed or is left, 2 if the question was wrong."""
    parser = parser_of("conformance", "Run every case on a GPU, or a slice in Triton's interpreter.")
    jobs = min(16, len(os.sched_getaffinity(0)))
    asked, header, done = measured(parser, arguments, jobs, _named, run_in_processes)
    failures = [outcome for outcome in done.results.values() if not outcome.ok]
    print(*failures, sep="\n")
    table = report.table(done.results.values(), header | {"seconds": f"{done.seconds:.0f}"})
    conclude(asked, "conformance", table, report.summary, left=done.left)
    return 1 if failures or done.left else 0
