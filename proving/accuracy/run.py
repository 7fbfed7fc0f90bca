"""Cases measured, in one process or side by side."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
from tqdm import tqdm

from normforge.tools.machine import Machine

from .cases import AnyCase
from .measure import Cell, measure
from .report import Outcome


def run(chosen: Sequence[AnyCase], machine: Machine, seed: int, jobs: int) -> Outcome:
    """Measure cases, in as many processes."""
    cells: dict[AnyCase, list[Cell]] = {}
    broken: dict[AnyCase, str] = {}
    for case, found in tqdm(_each(chosen, machine, seed, jobs), total=len(chosen), unit=" cases", file=sys.stderr):
        if isinstance(found, str):
            broken[case] = f"{case.name}: {found}"
        else:
            cells[case] = found
    # In the order of the cases, whichever process was first.
    return Outcome(
        [cell for case in chosen for cell in cells.get(case, ())], [broken[case] for case in chosen if case in broken]
    )


def _each(
    chosen: Sequence[AnyCase], machine: Machine, seed: int, jobs: int
) -> Iterator[tuple[AnyCase, list[Cell] | str]]:
    if jobs == 1:
        for case in chosen:
            yield case, attempt(case, machine.device, seed)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(attempt, case, machine.device, seed): case for case in chosen}
        for done in as_completed(pending):
            problem = done.exception()
            # A process that was killed takes the others' cases with it: each is told.
            yield pending[done], done.result() if problem is None else f"{type(problem).__name__}: {problem}"


def attempt(case: AnyCase, device: torch.device, seed: int) -> list[Cell] | str:
    """A case's cells, or why it did not run."""
    try:
        return measure(case, device, seed)
    except Exception as problem:
        # A tile that needs more registers or shared memory than there are, say: told with the others, at the end.
        lines = str(problem).splitlines()
        return f"{type(problem).__name__}: {lines[0] if lines else 'no message'}"
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
