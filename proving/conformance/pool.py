"""Run groups of cases that share kernels, in processes that share a GPU: compiling is what takes long."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from benchmarks.progress import progress_over

from .. import parts
from .case import Case
from .outcome import Outcome
from .run import run
from .table import groups

# Inputs of so many elements, and a backward pass of their tensors, are not held by two processes at once.
_LARGE = 1 << 27
# What a process may keep of the memory that a case took.
_KEPT_BYTES = 1 << 31


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the GPU's memory, among all processes of this user."""
    with (Path(tempfile.gettempdir()) / f"normforge-conformance-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_group(group: Sequence[Case], device: torch.device, seed: int) -> Iterator[tuple[str, Outcome]]:
    """Run cases one after another, in this process; yield the name and the outcome of each."""
    for case in group:
        with _alone() if case.rows * case.n > _LARGE else nullcontext():
            outcome = run(case, device, seed)
            if device.type == "cuda" and torch.cuda.memory_reserved(device) > _KEPT_BYTES:
                torch.cuda.empty_cache()
        yield case.id, outcome


def run_in_processes(
    due: Sequence[Case], device: torch.device, seed: int, jobs: int
) -> Generator[tuple[str, Outcome], None, None]:
    """Run cases in `jobs` processes; outcomes come as they are there, one for each case."""
    work = partial(run_group, device=device, seed=seed)
    found = parts.in_processes(groups(due), work, jobs)
    yield from progress_over(found, what="conformance", unit="case", total=len(due))
