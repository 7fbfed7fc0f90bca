"""Cases measured, in one process or side by side."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial

import torch
from tqdm import tqdm

from normforge.tools.machine import Machine

from .. import parts
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
    measured = parts.in_processes(chosen, partial(_named, device=machine.device, seed=seed), jobs)
    yield from tqdm(measured, total=len(chosen), unit=" cases", file=sys.stderr)


def _named(case: AnyCase, device: torch.device, seed: int) -> Iterator[tuple[str, Result]]:
    yield case.name, attempt(case, device, seed)


def attempt(case: AnyCase, device: torch.device, seed: int) -> Result:
    """Return the cells of a case, or why it did not run."""
    try:
        return measure(case, device, seed)
    except Exception as problem:
        # A tile that needs more registers or shared memory than there are, say: reported at the end, with all others.
        return parts.told(problem)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
