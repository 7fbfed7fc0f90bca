"""Cases measured, in one process or side by side."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import partial

import torch

from benchmarks.progress import progress_over

from .. import parts
from .cases import AnyCase
from .measure import measure
from .report import Result


def run(
    chosen: Sequence[AnyCase], device: torch.device, seed: int, jobs: int
) -> Generator[tuple[str, Result], None, None]:
    """Measure cases in as many processes, and yield the name and the result of each."""
    found = parts.in_processes(chosen, partial(_attempted, device=device, seed=seed), jobs)
    yield from progress_over(found, what="accuracy", unit="case", total=len(chosen))


def _attempted(case: AnyCase, device: torch.device, seed: int) -> Iterator[tuple[str, Result]]:
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
