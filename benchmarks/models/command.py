"""The command `models`: which jobs are due, a process for each, and what is made of their rows."""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path

from normforge.tools.machine import Machine

from ..chosen import RESULTS
from ..environment import ROOT, describe, folder_name, machine_here
from ..errors import UsageError
from ..progress import progress_over
from .names import COMPILE, DTYPES, EAGER, FAILS, GRAPHS, SUITE, WRONG, Key
from .specs import SPECS
from .table import Row, Table, extend, load, tables_of
from .variants import VARIANTS, versions
from .worker import Job

# The command's status where a row is wrong, or a process broke.
SHORT = 1


def models(options: argparse.Namespace, _: list[str]) -> int:
    """Run the verb: measure what is not in the table yet, and print it.

    Returns:
        0, or 1 if a row is wrong or a process broke; 0 also when the time was up before the end.

    Raises:
        UsageError: an option names nothing, or the folder holds results of something else.
    """
    machine = machine_here()
    size = "tiny" if machine.interpreted else "quick" if options.quick else "full"
    header = describe(machine, (), options.revision) | versions()
    if size != "full":
        header["size"] = size
    out = options.out or RESULTS / f"{folder_name(machine)}-models"
    deadline = None if options.minutes is None else time.time() + 60 * options.minutes
    table = _open(out, header, fresh=options.fresh, retry=options.retry)
    jobs = _jobs(options, machine, size, out, header, deadline)
    broken = []
    # Jobs that need no compiling go first, because the time may be up before compilation is done.
    for _dtype_and_runs, block in groupby(jobs, lambda job: (job.dtype, job.runs)):
        together = list(block)
        if options.jobs > 0:
            _prepare(together, load(out, header) or table, options.jobs)
        what = f"{together[0].dtype}, {' and '.join(together[0].runs)}"
        broken += [_run(job, out, header) for job in progress_over(together, what=what, unit="model")]
    table = load(out, header) or table
    _report(table, jobs)
    wrong = [row for row in table.rows.values() if row.status.startswith(WRONG)]
    for row in wrong:
        print(f"{'/'.join(row.key)} is {row.status}", file=sys.stderr)
    for said in filter(None, broken):
        print(f"error: {said}", file=sys.stderr)
    return SHORT if wrong or any(broken) else 0


def launch(job: Job) -> int:
    """Do a job in a process of its own; the result is its exit status."""
    command = (sys.executable, "-m", "benchmarks.models.worker", job.text())
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode


def _open(out: Path, header: dict[str, str], *, fresh: bool, retry: bool) -> Table:
    if fresh:
        for ending in ("csv", "png"):
            (out / f"{SUITE}.{ending}").unlink(missing_ok=True)
    # The job of a command that was killed is due again, and did not fail.
    for mark in out.glob(f"{SUITE}.*.running"):
        mark.unlink(missing_ok=True)
    table = load(out, header) or Table(header)
    if retry:
        table.rows = {key: row for key, row in table.rows.items() if row.ok}
        table.save(out)
    return table


def _jobs(
    options: argparse.Namespace, machine: Machine, size: str, out: Path, header: dict[str, str], deadline: float | None
) -> list[Job]:
    """Return the jobs in order of worth: bf16 before autocast, eager before compiled, models as in `SPECS`."""
    chosen = chosen_names("--models", options.models, SPECS)
    variants = chosen_names("--variants", options.variants, VARIANTS)
    # There are no CUDA graphs in the interpreter.
    compiled = (COMPILE,) if machine.interpreted else (COMPILE, GRAPHS)
    runs = [tuple(run for run in runs if run in options.runs) for runs in ((EAGER,), compiled)]
    jobs = [
        Job(
            model,
            dtype,
            run,
            tuple(options.steps),
            variants,
            size,
            machine.device.type,
            str(out.resolve()),
            header,
            options.rounds,
            deadline,
        )
        for dtype in DTYPES
        if dtype in options.dtypes
        for run in runs
        for model in chosen
    ]
    return [job for job in jobs if job.keys]


def chosen_names(option: str, given: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    """Return the names that a pattern matches, in their order; all names without a pattern.

    Raises:
        UsageError: a pattern matches none.
    """
    missed = [pattern for pattern in given if not fnmatch.filter(names, pattern)]
    if missed:
        raise UsageError(f"{option} {' '.join(missed)} names nothing; there are {', '.join(names)}")
    return tuple(name for name in names if not given or any(fnmatch.fnmatchcase(name, pattern) for pattern in given))


def _prepare(jobs: Sequence[Job], table: Table, processes: int) -> None:
    """Compile what the compiled jobs need, several at once, into the caches on disk.

    Tracing takes most of the time, and is done by one thread: each variant's step is a process of its own.
    """
    parts = [
        replace(job, ahead=True, steps=(step,), variants=(variant,))
        for job in jobs
        if EAGER not in job.runs and not job.late
        for step, variant in product(job.steps, job.variants)
    ]
    due = [part for part in parts if table.due(part.keys)]
    with ThreadPoolExecutor(processes) as pool:
        for job, status in zip(due, pool.map(launch, due), strict=True):
            if status:
                print(f"compiling {job.model} in {job.dtype} ahead ended with status {status}", file=sys.stderr)


def _run(job: Job, out: Path, header: dict[str, str]) -> str | None:
    """Run a job until it has no row due; return what is to be said if it broke and no variant is to blame."""
    while not job.late and (load(out, header) or Table(header)).due(job.keys):
        before = _rows(out, job)
        status = launch(job)
        if status == 0:
            break
        _blame(job, status)
        if _rows(out, job) == before:
            return f"the process of {job.model} in {job.dtype}, {' and '.join(job.runs)}, ended with {status}"
    return None


def _rows(out: Path, job: Job) -> dict[Key, Row]:
    found = load(out, job.header)
    return {} if found is None else {key: row for key, row in found.rows.items() if key in job.keys}


def _blame(job: Job, status: int) -> None:
    """Record the variant that a process died of, so that the next one does not die of it too."""
    if not job.mark.exists():
        return
    key = Key(*json.loads(job.mark.read_text()))
    job.mark.unlink()
    extend(Path(job.out), job.header, [Row(*key, f"{FAILS}: the process died with status {status} while this ran")])


def _report(table: Table, jobs: Sequence[Job]) -> None:
    left = sum(len(table.due(job.keys)) for job in jobs)
    if left:
        print(f"{left} rows are left; the same command goes on", file=sys.stderr)
    print("\n\n".join(made.markdown() for made in tables_of(table)))
