"""Cases measured, in one process or side by side."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
from tqdm import tqdm

from normforge.tools.machine import Machine

from .cases import AnyCase
from .measure import Cell, measure
from .report import Outcome

# The cells of a case, or why it did not run.
Result = list[Cell] | str


def outcome_of(found: Mapping[str, Result]) -> Outcome:
    """Return the outcome of the results of cases, by name."""
    return Outcome(
        [cell for result in found.values() if not isinstance(result, str) for cell in result],
        [f"{name}: {result}" for name, result in found.items() if isinstance(result, str)],
    )


def run(chosen: Sequence[AnyCase], machine: Machine, seed: int, jobs: int) -> Generator[tuple[str, Result], None, None]:
    """Measure cases in as many processes, and yield the name and the result of each."""
    with tqdm(total=len(chosen), unit=" cases", file=sys.stderr) as progress:
        for found in _each(chosen, machine, seed, jobs):
            progress.update()
            yield found


def _each(
    chosen: Sequence[AnyCase], machine: Machine, seed: int, jobs: int
) -> Generator[tuple[str, Result], None, None]:
    if jobs == 1:
        for case in chosen:
            yield case.name, attempt(case, machine.device, seed)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(attempt, case, machine.device, seed): case for case in chosen}
        try:
            for done in as_completed(pending):
                problem = done.exception()
                # A process that was killed takes the others' cases with it, and each says so.
                yield pending[done].name, done.result() if problem is None else f"{type(problem).__name__}: {problem}"
        finally:
            pool.shutdown(cancel_futures=True)


def attempt(case: AnyCase, device: torch.device, seed: int) -> Result:
    """Return the cells of a case, or why it did not run."""
    try:
        return measure(case, device, seed)
    except Exception as problem:
        # A tile that needs more registers or shared memory than there are, say: told with the others, at the end.
        lines = str(problem).splitlines()
        return f"{type(problem).__name__}: {lines[0] if lines else 'no message'}"
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
