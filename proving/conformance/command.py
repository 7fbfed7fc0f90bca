"""`python -m proving conformance`: every case on a GPU, or a slice in Triton's interpreter, as a table."""

from __future__ import annotations

import argparse
import os
from collections.abc import Generator, Sequence

import torch

from benchmarks.environment import describe
from benchmarks.progress import progress_to
from normforge.errors import DeviceError
from normforge.tools.machine import find_machine

from .. import parts
from ..evidence import add_options, record
from . import report
from .case import Case
from .outcome import Outcome
from .pool import run_in_processes
from .report import Report
from .table import SUITES, cases, groups, interpreted


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
    done = parts.run(chosen, lambda due: _run(due, machine.device, asked), asked, header)
    found = Report.of(header, done.results.values(), done.seconds)
    print(found.details(), found.summary(), sep="\n\n", end="\n\n")
    for failure in found.failures:
        print(failure)
    print(found.totals())
    if asked.record and not done.left:
        record(asked.record, "conformance", found.table(), report.summary)
    return 1 if found.failures or done.left else 0


def _run(
    due: Sequence[Case], device: torch.device, asked: argparse.Namespace
) -> Generator[tuple[str, Outcome], None, None]:
    with progress_to(len(due), what="conformance", unit="case") as progress:
        for outcome in run_in_processes(groups(due), device, asked.seed, asked.jobs):
            progress.update()
            if not outcome.ok:
                progress.write(str(outcome))
            yield outcome.case, outcome


def _is_chosen(case: Case, asked: argparse.Namespace) -> bool:
    return case.suite in asked.suite and asked.only in case.id


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m proving conformance", description=__doc__)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=list(SUITES), help="these suites alone")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--jobs", type=_positive, default=min(16, cores), help="processes that share the GPU")
    parser.add_argument("--seed", type=int, default=0, help="of every input")
    add_options(parser)
    parts.add_options(parser)
    return parser
