"""`python -m proving conformance`: every case on a GPU, or a slice in Triton's interpreter, as a table."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from benchmarks.environment import describe
from normforge.errors import DeviceError
from normforge.tools.machine import find_machine

from .. import parts
from ..evidence import conclude, parser_of
from . import report
from .case import Case
from .run import run_in_processes
from .suites import SUITES, cases, interpreted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked; 0 if every case passed, 1 if one failed or is left, 2 if the question was wrong."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    try:
        machine = find_machine()
    except DeviceError as error:
        parser.error(str(error))
    every = interpreted() if machine.interpreted else cases()
    chosen = {case.id: case for case in every if _is_chosen(case, asked)}
    if not chosen:
        parser.error("--suite and --only leave no case; leave one of them out")
    header = describe(machine, (), asked.revision) | {"seed": str(asked.seed)}
    done = parts.run(chosen, lambda due: run_in_processes(due, machine.device, asked.seed, asked.jobs), asked, header)
    failures = [outcome for outcome in done.results.values() if not outcome.ok]
    print(*failures, sep="\n")
    table = report.table(done.results.values(), header | {"seconds": f"{done.seconds:.0f}"})
    conclude(asked, "conformance", table, report.summary, left=done.left)
    return 1 if failures or done.left else 0


def _is_chosen(case: Case, asked: argparse.Namespace) -> bool:
    return case.suite in asked.suite and asked.only in case.id


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("conformance", "Run every case on a GPU, or a slice in Triton's interpreter.")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=list(SUITES), help="these suites alone")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--jobs", type=_positive, default=min(16, cores), help="processes that share the GPU")
    parser.add_argument("--seed", type=int, default=0, help="of every input")
    parts.add_options(parser)
    return parser
