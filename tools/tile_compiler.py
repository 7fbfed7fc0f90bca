"""The kernels of trials, compiled side by side before the first of them is timed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType

import torch

from .budget import Budget, OutOfTimeError
from .tile_trials import Trial, tiled


class Compiler:
    """Processes that compile into Triton's cache; closed, they are gone.

    They stay from one group of trials to the next, because each takes seconds to import torch, and wait while tiles are
    timed.
    """

    def __init__(self, device: torch.device, jobs: int) -> None:
        """Start nothing yet.

        Args:
            device: what to compile for.
            jobs: how many processes; 0 compiles nothing ahead.
        """
        self._device = device
        self.jobs = jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def compile(self, trials: Sequence[Trial], budget: Budget, advance: Callable[[], object]) -> None:
        """Compile the kernels of trials.

        What fails here fails again, and is recorded, when its turn comes.

        Args:
            trials: what to compile.
            budget: how long that may take; what a process has begun it ends.
            advance: called when a trial is done.

        Raises:
            OutOfTimeError: the time is spent.
        """
        if not self.jobs:
            return
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.jobs, mp_context=multiprocessing.get_context("spawn"))
        try:
            pending = [self._pool.submit(_compile, trial, self._device) for trial in trials]
            for done in as_completed(pending, timeout=budget.seconds):
                if isinstance(done.exception(), BrokenProcessPool):
                    raise BrokenProcessPool
                advance()
        except TimeoutError:
            raise OutOfTimeError from None
        except BrokenProcessPool:
            # A compiler that crashes takes the others along; the rest of the group compiles in its turn.
            self._close()

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _compile(trial: Trial, device: torch.device) -> None:
    with tiled(trial):
        for n in trial.case.lengths:
            trial.case.run(1, device, n).call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
