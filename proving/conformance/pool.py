"""Runs cases in several processes that share a GPU: compiling is what takes long, and each compiles its own.

A case that leaves the GPU unusable takes its process along, and no other case: a new process goes on.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch

from .case import Case
from .outcome import Outcome
from .run import run

# Inputs of so many elements, and a backward pass of their tensors, are not held by two processes at once. A pool begins
# at most so many groups that have one: the others compile and run what is smaller.
_LARGE, _LARGE_AT_ONCE = 1 << 27, 3
# The fewest rows that take the kernels of many rows, whatever the table's limit of few is.
_MANY_ROWS = 1000
# What a process may keep of the memory that a case took.
_KEPT_BYTES = 1 << 31


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the GPU's memory, among all processes of this user."""
    with (Path(tempfile.gettempdir()) / f"normforge-conformance-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_group(group: Sequence[Case], device: torch.device, seed: int) -> Iterator[Outcome]:
    """Run cases one after another, in this process."""
    for case in group:
        if _is_large(case):
            # What has to be compiled is compiled here, so that others need not wait for it.
            run(replace(case, shape=(_MANY_ROWS, case.n)), device, seed)
        with _alone() if _is_large(case) else nullcontext():
            outcome = run(case, device, seed)
            if device.type == "cuda" and torch.cuda.memory_reserved(device) > _KEPT_BYTES:
                torch.cuda.empty_cache()
        yield outcome


def run_in_processes(
    groups: Sequence[tuple[Case, ...]], device: torch.device, seed: int, jobs: int
) -> Iterator[Outcome]:
    """Run groups of cases in `jobs` processes; outcomes come as they are there, one for each case."""
    queue = _Queue(groups)
    workers: dict[Connection, _Worker] = {}
    try:
        yield from _outcomes(queue, workers, device, seed, jobs)
    finally:
        for worker in workers.values():
            worker.process.terminate()


def _outcomes(
    queue: _Queue, workers: dict[Connection, _Worker], device: torch.device, seed: int, jobs: int
) -> Iterator[Outcome]:
    while True:
        while len(workers) < jobs and (group := queue.take(workers.values())):
            worker = _Worker(device, seed)
            workers[worker.connection] = worker
            worker.give(group)
        if not workers:
            return
        for connection in wait(list(workers)):
            assert isinstance(connection, Connection)
            worker = workers[connection]
            outcome = worker.answer()
            yield outcome
            if worker.usable and not worker.cases and (group := queue.take(workers.values())):
                worker.give(group)
            elif not worker.usable or not worker.cases:
                queue.put_back(worker.cases)
                del workers[connection]
                worker.stop()


class _Queue:
    """Groups of cases that no process has begun."""

    def __init__(self, groups: Sequence[tuple[Case, ...]]) -> None:
        self._small = [group for group in reversed(groups) if not any(map(_is_large, group))]
        self._large = [group for group in reversed(groups) if any(map(_is_large, group))]

    def take(self, workers: Iterable[_Worker]) -> tuple[Case, ...] | None:
        """Return the next group that may begin beside what these work on."""
        begun = sum(any(map(_is_large, worker.cases)) for worker in workers)
        if self._large and (begun < _LARGE_AT_ONCE):
            return self._large.pop()
        return self._small.pop() if self._small else None

    def put_back(self, cases: Sequence[Case]) -> None:
        """Return what a process left."""
        if cases:
            (self._large if any(map(_is_large, cases)) else self._small).append(tuple(cases))


def _is_large(case: Case) -> bool:
    return case.rows * case.n > _LARGE


class _Worker:
    """A process, and the cases that it has yet to answer."""

    def __init__(self, device: torch.device, seed: int) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=work, args=(theirs, device, seed), daemon=True)
        self.process.start()
        theirs.close()
        self.cases: list[Case] = []
        self.usable = True

    def give(self, group: tuple[Case, ...]) -> None:
        self.cases = list(group)
        self.connection.send(group)

    def answer(self) -> Outcome:
        """Return the outcome of the next case, which it may have ended the process to find."""
        case = self.cases.pop(0)
        try:
            outcome, self.usable = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.usable = False
            self.process.join()
            how = f"the process ended, with status {self.process.exitcode}"
            return Outcome(case.id, case.suite, case.mode, (), how)
        assert isinstance(outcome, Outcome)
        return outcome

    def stop(self) -> None:
        if self.usable:
            self.connection.send(None)
        self.process.join()
        self.connection.close()


def work(connection: Connection, device: torch.device, seed: int) -> None:
    """Answer for groups of cases until there are no more; what a process of the pool does."""
    # The processes are the parallelism.
    torch.set_num_threads(1)
    while (group := connection.recv()) is not None:
        for outcome in run_group(group, device, seed):
            # A GPU may answer a process nothing more; the next case is then another's.
            usable = not outcome.error or _answers(device)
            connection.send((outcome, usable))
            if not usable:
                os._exit(1)


def _answers(device: torch.device) -> bool:
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.zeros(1, device=device).item()
    except Exception:
        return False
    return True
