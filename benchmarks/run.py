"""One run of the command `run`: from its options to files."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from .cells import Cell, Suite, at_most
from .chosen import RESULTS, matching, of_seed
from .compile_ahead import compile_ahead
from .environment import describe, folder_name, machine_here
from .errors import UsageError
from .pictures import draw_all
from .providers import find_providers
from .results import SEED, Results, load, require_header
from .runner import ContextLostError, Plan, blame, due, run_suite, running
from .suites import SUITES

# Cells that are compiled ahead together under a deadline: of the suite `sweep`, a turn.
_STAGE = 168


def run(options: argparse.Namespace, given: list[str]) -> int:
    """Measure what the options ask for and is not in the results yet.

    Args:
        options: of the command line.
        given: the arguments they were parsed from, to begin again with after a provider has taken the GPU down.

    Returns:
        0, also when the time was up before the end; the results hold what was measured.

    Raises:
        UsageError: an option names nothing, or the results folder holds results of something else.
    """
    began = time.monotonic()
    machine = machine_here()
    present, absent = find_providers(options.providers)
    for name, reason in absent.items():
        print(f"skipped: {name} is not here ({reason})", file=sys.stderr)
    # The header states every peer that is there, so that runs of different slices go on with the same file.
    everything, _ = find_providers([])
    header = describe(machine, everything.values(), options.revision)
    if options.rows is not None:
        header["rows"] = f"no more than {options.rows}"
    out = options.out or RESULTS / folder_name(machine)
    deadline = None if options.minutes is None else began + 60 * options.minutes
    plan = Plan(machine.device, present, out, options.budget_ms, options.rounds, options.retry, deadline)
    work = _select(options, header, out)
    if options.jobs > 0 and deadline is None:
        compile_ahead([one for each in work for one in due(*each, plan)], machine.device, options.jobs)
    finished = []
    for suite, cells, results in work:
        try:
            left = _run_in_stages(suite, cells, results, plan, options.jobs)
        except ContextLostError as error:
            print(f"the GPU was lost to {error}; beginning again after it", file=sys.stderr)
            _begin_again(given, deadline)
        if left:
            print(f"{suite.name}: the time was up with {left} cells left; the same command goes on", file=sys.stderr)
        elif results.rows:
            finished.append(results)
    for path in draw_all(finished, out):
        print(f"drawn: {path}")
    return 0


def _run_in_stages(suite: Suite, cells: tuple[Cell, ...], results: Results, plan: Plan, jobs: int) -> int:
    """Run a suite, and return how many cells are left; under a deadline, compile no more ahead than may be begun."""
    if plan.deadline is None:
        return run_suite(suite, cells, results, plan)
    left = 0
    # The cell that a process died of may be of any stage.
    blame(suite, cells, results, plan)
    for start in range(0, len(cells), _STAGE):
        stage = cells[start : start + _STAGE]
        if jobs > 0 and time.monotonic() <= plan.deadline:
            compile_ahead(due(suite, stage, results, plan), plan.device, jobs)
        left += run_suite(suite, stage, results, plan)
    return left


def _select(
    options: argparse.Namespace, header: dict[str, str], out: Path
) -> list[tuple[Suite, tuple[Cell, ...], Results]]:
    work = []
    for suite in of_seed([SUITES[name] for name in dict.fromkeys(options.suite or SUITES)], options.seed):
        cells = at_most(suite.cells, options.rows)
        if chosen := tuple(matching(cells, options.only)):
            work.append((suite, chosen, _open(suite, header, out, options)))
    if not work:
        raise UsageError(f"--only {' '.join(options.only)} matches no cell; see `python -m benchmarks list`")
    return work


def _open(suite: Suite, header: dict[str, str], out: Path, options: argparse.Namespace) -> Results:
    name = suite.name
    if suite.seed is not None:
        header = header | {SEED: str(suite.seed)}
    if options.fresh:
        running(out, name).unlink(missing_ok=True)
    found = None if options.fresh else load(out, name)
    if found is None:
        return Results(name, header)
    require_header(out / f"{name}.csv", found.header, header)
    return found


def _begin_again(given: list[str], deadline: float | None) -> None:
    # Failures are in the results, so this ends. Later options win over earlier ones.
    arguments = [argument for argument in given if argument not in ("--fresh", "--retry")]
    arguments += ["--jobs", "0"]
    if deadline is not None:
        arguments += ["--minutes", f"{max(0.0, deadline - time.monotonic()) / 60:.2f}"]
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *arguments])
