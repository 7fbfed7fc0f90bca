"""Fills the compilers' caches on disk from several processes, so that the one that times finds everything compiled.

Triton, Inductor and QuACK each keep what they compiled. Inductor also keeps which of several kernels was the fastest;
found while processes share the GPU that would mean nothing, so it is not written here, and the timing process chooses.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from .cells import Cell
from .inputs import make_inputs
from .progress import progress_to
from .provider import Provider
from .providers import every_provider
from .runner import first_line, keep_what_is_loaded, prepare, release

# A worker that dies takes the pool with it, and with the pool what other workers had begun.
_POOLS = 4

Task = tuple[Cell, str]


def compile_ahead(work: Sequence[tuple[Cell, Sequence[Provider]]], device: torch.device, jobs: int) -> None:
    """Call each provider that compiles once on each cell, in `jobs` processes; failures are left for the run to meet.

    Args:
        work: cells, each with the providers to call on it.
        device: where.
        jobs: how many processes.
    """
    tasks = [(cell, provider.name) for cell, providers in work for provider in providers if provider.compiles]
    if not tasks:
        return
    with progress_to(len(tasks), what="compile", unit="kernel") as progress:
        for _ in range(_POOLS):
            done = set()
            for task, failure in _results(tasks, device, jobs):
                done.add(task)
                progress.update()
                if failure:
                    progress.write(f"  {task[1]} on {task[0].id} fails: {failure}")
            tasks = [task for task in tasks if task not in done]
            if not tasks:
                return
        progress.write(f"  {len(tasks)} are left to the run: processes died over and over while compiling them")


def _results(tasks: Sequence[Task], device: torch.device, jobs: int) -> Iterator[tuple[Task, str]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), context, initializer=_set_up) as pool:
        futures: dict[Future[str], Task] = {pool.submit(compile_one, *task, str(device)): task for task in tasks}
        for future in as_completed(futures):
            try:
                failure = future.result()
            except BrokenProcessPool:
                continue
            yield futures[future], failure


def _set_up() -> None:
    torch.set_num_threads(1)
    compile_beside_others()


def compile_beside_others() -> None:
    """Have Inductor compile in this process alone, and keep no choice of kernels that others beside it disturbed."""
    import torch._inductor.config

    # The processes are the parallelism. Neither setting is part of the cache's keys.
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.autotune_local_cache = False


def compile_one(cell: Cell, name: str, device: str) -> str:
    """Call a provider once on a cell; what is returned is how it failed, or nothing."""
    place, failure = torch.device(device), ""
    try:
        provider = every_provider()[name]
        if provider.reset is not None:
            provider.reset()
        prepare(provider, [make_inputs(cell, place)], None)
    except Exception as error:  # the run meets it again, and records it
        failure = first_line(error)
    try:
        release(place)
    except Exception:
        # The GPU answers this process nothing more, whatever it is given to do; a new pool goes on without it.
        os._exit(1)
    if place.type == "cuda":
        keep_what_is_loaded()
    return failure
