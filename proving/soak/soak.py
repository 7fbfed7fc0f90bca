"""A soak: random legal calls from several threads, on several streams, for as long as one likes."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass

import torch
from tqdm import tqdm

from tests.properties.profile import compile_ahead, make_pool

from .measure import Growth, Held, growths, held
from .work import SIZES, Gate, Worker

# Of the time after kernels are compiled: how much is warm-up, and how many samples are taken after it.
_WARM_UP = 0.2
_SAMPLES = 24

# So many failures are more of the same.
_MOST_FAILURES = 20


@dataclass(frozen=True)
class Result:
    """The work and the findings of a soak.

    Attributes:
        done: how much of what.
        failures: each as a worker told it.
        growths: of what the process holds.
        seconds: how long workers ran.
        kinds: how many kinds of calls there were.
    """

    done: Counter[str]
    failures: list[str]
    growths: list[Growth]
    seconds: float
    kinds: int

    @property
    def ok(self) -> bool:
        """Return True if nothing failed, and nothing grew."""
        return not self.failures and all(growth.ok for growth in self.growths)


def soak(minutes: float, seed: int, device: torch.device, *, progress: bool = True) -> Result:
    """Run random calls for so many minutes, compilation aside.

    Args:
        minutes: how long.
        seed: of the kinds, and of each thread's calls.
        device: a GPU, or the CPU under TRITON_INTERPRET=1.
        progress: whether to show a progress bar.
    """
    size = SIZES[device.type]
    gate = Gate(size.threads)
    kinds = make_pool(random.Random(seed).choice, size.lengths, size.kinds)
    before = held(device, 0)
    if device.type == "cuda":
        compile_ahead(kinds, device)
    workers = [Worker(kinds, device, gate, f"{seed} {i}", size) for i in range(size.threads)]
    workers[0].warm_up()

    end = time.monotonic() + 60 * minutes
    started = time.monotonic()

    def run(worker: Worker) -> None:
        while time.monotonic() < end and len(worker.failures) < _MOST_FAILURES:
            worker.act()

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    samples = _watch(threads, workers, gate, device, end, progress)
    for thread in threads:
        thread.join()
    done = sum((worker.done for worker in workers), Counter[str]())
    failures = [failure for worker in workers for failure in worker.failures]
    return Result(done, failures, growths(before, samples), time.monotonic() - started, sum(size.kinds.values()))


def _watch(
    threads: list[threading.Thread], workers: list[Worker], gate: Gate, device: torch.device, end: float, progress: bool
) -> list[Held]:
    """Measure what is held now and then, while nothing runs; the first time after warm-up."""
    started = time.monotonic()
    begin = started + _WARM_UP * (end - started)
    samples: list[Held] = []
    for index in tqdm(range(_SAMPLES), desc="soak", disable=not progress):
        due = begin + (end - begin) * index / (_SAMPLES - 1)
        while time.monotonic() < due and any(thread.is_alive() for thread in threads):
            time.sleep(min(0.2, max(0.0, due - time.monotonic())))
        with gate.alone():
            samples.append(held(device, sum(worker.calls for worker in workers)))
    return samples
