"""`python -m proving conformance`: every case on a GPU, or a slice in Triton's interpreter, as a table."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import describe
from benchmarks.progress import progress_to
from normforge.errors import DeviceError
from normforge.tools.machine import find_machine

from ..evidence import add_option, record
from . import report
from .case import Case
from .pool import run_in_processes
from .report import Report
from .table import SUITES, cases, groups, interpreted, share


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked; 0 if every case passed, 1 if one failed, 2 if the question was wrong."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    try:
        found = report.merge([report.read(path) for path in asked.merge]) if asked.merge else _run(asked, parser)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(found.details(), found.summary(), sep="\n\n", end="\n\n")
    for failure in found.failures:
        print(failure)
    print(found.totals())
    if asked.results:
        found.write(asked.results)
    if asked.record:
        record(asked.record, "conformance", found.table(), report.summary)
    return 1 if found.failures else 0


def _run(asked: argparse.Namespace, parser: argparse.ArgumentParser) -> Report:
    try:
        machine = find_machine()
    except DeviceError as error:
        parser.error(str(error))
    chosen = [case for case in (interpreted() if machine.interpreted else cases()) if _is_chosen(case, asked)]
    if not chosen:
        parser.error("--suite and --only leave no case; leave one of them out")
    part, parts = asked.slice
    selected = share(groups(chosen), part, parts)
    header = describe(machine, (), asked.revision) | {"seed": str(asked.seed)}
    found = Report(header, parts=[(part, parts)])
    started = time.monotonic()
    with progress_to(sum(map(len, selected)), what="conformance", unit="case") as progress:
        for outcome in run_in_processes(selected, machine.device, asked.seed, asked.jobs):
            found.count(outcome)
            progress.update()
            if not outcome.ok:
                progress.write(str(outcome))
    found.seconds = time.monotonic() - started
    return report.merge([found])


def _is_chosen(case: Case, asked: argparse.Namespace) -> bool:
    return case.suite in asked.suite and asked.only in case.id


def _slice(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; say 1/3 for the first of three")
    return int(part), int(parts)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m proving conformance", description=__doc__)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=list(SUITES), help="these suites alone")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--slice", type=_slice, default=(1, 1), metavar="K/N", help="the K-th of N equal parts")
    parser.add_argument("--jobs", type=_positive, default=min(16, cores), help="processes that share the GPU")
    parser.add_argument("--seed", type=int, default=0, help="of every input")
    parser.add_argument("--revision", help="what the header says, where git does not know")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write a file for --merge")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="run nothing; add up these results")
    add_option(parser)
    return parser
