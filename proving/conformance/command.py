"""`python -m proving conformance`: every case on a GPU, or a slice in Triton's interpreter, as a table."""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks.environment import describe
from normforge.errors import DeviceError
from normforge.tools.machine import find_machine

from .. import parts
from ..evidence import conclude, parser_of
from . import report
from .run import run_in_processes
from .suites import cases, interpreted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked; 0 if every case passed, 1 if one failed or is left, 2 if the question was wrong."""
    parser = parser_of("conformance", "Run every case on a GPU, or a slice in Triton's interpreter.")
    parser.add_argument("--seed", type=int, default=0, help="of every input")
    parts.add_options(parser, jobs=min(16, len(os.sched_getaffinity(0))))
    asked = parser.parse_args(arguments)
    try:
        machine = find_machine()
    except DeviceError as error:
        parser.error(str(error))
    every = interpreted() if machine.interpreted else cases()
    chosen = parts.chosen({case.id: case for case in every}, parser, asked)
    header = describe(machine, (), asked.revision) | {"seed": str(asked.seed)}
    done = parts.run(chosen, lambda due: run_in_processes(due, machine.device, asked.seed, asked.jobs), asked, header)
    failures = [outcome for outcome in done.results.values() if not outcome.ok]
    print(*failures, sep="\n")
    table = report.table(done.results.values(), header | {"seconds": f"{done.seconds:.0f}"})
    conclude(asked, "conformance", table, report.summary, left=done.left)
    return 1 if failures or done.left else 0
