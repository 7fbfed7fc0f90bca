"""Run the loop of a soak's worker: a random call on a random stream, checked by chance.

Workers share the device, and a capture or a measurement has it alone.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from normforge.errors import NormforgeError
from tests.properties.illegal import spoilt
from tests.properties.profile import PROBLEMS, Pool

# Of calls that can be checked, the share that is: a check takes as long as dozens of calls.
_CHECKED = 0.25

_REPLAYS = 5


@dataclass(frozen=True)
class Size:
    """The sizes that a soak draws from; each kind of call is compiled for few rows and for many."""

    lengths: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    kinds: Mapping[str, int]
    threads: int
    most: int


SIZES = {
    "cuda": Size(
        lengths=(64, 100, 257, 768, 1024, 1536, 2048, 4096, 4099, 5120, 8192, 16384, 40000),
        shapes=((300,), (1,), (), (2, 150), (4, 1, 3), (0,)),
        kinds={"calls": 40, "steps": 10, "backward": 6},
        threads=4,
        most=1 << 22,
    ),
    "cpu": Size(
        lengths=(24, 130),
        shapes=((2,), (1, 3), ()),
        kinds={"calls": 6, "steps": 2, "backward": 2},
        threads=3,
        most=1 << 12,
    ),
}


class Gate:
    """A permit for each of several threads; a thread that runs alone holds all of them."""

    def __init__(self, threads: int) -> None:
        self._threads, self._permits, self._one = threads, threading.Semaphore(threads), threading.Lock()

    def shared(self) -> AbstractContextManager[None]:
        """Run beside others, once no thread has the gate alone."""
        return self._held(1)

    def alone(self) -> AbstractContextManager[None]:
        """Run by oneself, once all others are done; who comes later waits."""
        return self._held(self._threads)

    @contextmanager
    def _held(self, permits: int) -> Iterator[None]:
        # One at a time: a thread that waits to be alone lets no other thread in.
        with self._one:
            for _ in range(permits):
                self._permits.acquire()
        try:
            yield
        finally:
            self._permits.release(permits)


class Worker:
    """One thread's calls: from its own random numbers, on its own streams.

    Attributes:
        done: how much of what.
        failures: what failed, and how.
    """

    def __init__(self, kinds: Pool, device: torch.device, gate: Gate, seed: str, size: Size) -> None:
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []
        self._kinds, self._device, self._gate = kinds, device, gate
        self._random = random.Random(seed)
        self._shapes, self._most = size.shapes, size.most
        self._is_gpu = device.type == "cuda"
        # torch declares no types for its streams.
        make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
        self._streams = [make(device) for _ in range(3)] if self._is_gpu else []
        self._actions: tuple[tuple[Callable[[], None], str, int], ...] = (
            (partial(self._run, "calls", "forward calls"), "call", 12),
            (partial(self._run, "steps", "training steps"), "step", 5),
            (partial(self._run, "backward", "backward calls"), "backward", 3),
            (self._mistake, "mistake", 1),
            (self._graph, "graph", 1 if self._is_gpu else 0),
        )

    def act(self) -> None:
        """Do one thing, and record failures."""
        ((action, name, _),) = self._random.choices(self._actions, [weight for *_, weight in self._actions])
        try:
            # A capture waits for all others, and so takes the gate itself.
            with nullcontext() if name == "graph" else self._gate.shared():
                action()
        except Exception as error:  # Whatever it is, it is what the soak is for.
            self.failures.append(f"{name}: {type(error).__name__}: {error}")

    def warm_up(self) -> None:
        """Call every kind with every shape, so that nothing is met later for the first time."""
        for what, shape in product(self._kinds, self._shapes):
            for kind in self._kinds[what]:
                problem = PROBLEMS[what].draw(self._random.choice, kind, (shape,), self._most)
                # Words and ck_tile's integers are kinds of calls of their own.
                ways = [replace(problem, coded=coded) for coded in (False, True)] if what == "calls" else [problem]
                for each in ways:
                    each.made(self._device).run()

    @property
    def calls(self) -> int:
        """How many calls were made."""
        return sum(count for name, count in self.done.items() if name != "checks")

    def _leading(self) -> tuple[tuple[int, ...], ...]:
        """Any number of rows, or one of the shapes with more dimensions: of those a plan each is kept."""
        rows = self._random.choice((self._random.randrange(1, 9), self._random.randrange(1, 3000)))
        return (*self._shapes, *[(rows,)] * 20) if self._is_gpu else self._shapes

    def _on_a_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._random.choice(self._streams)) if self._is_gpu else nullcontext()

    def _made(self, what: str = "calls") -> Any:
        kind = self._random.choice(self._kinds[what])
        problem = PROBLEMS[what].draw(self._random.choice, kind, self._leading(), self._most)
        if what == "calls":
            problem = replace(problem, poisoned=self._random.random() < 0.1)
        return problem.made(self._device)

    def _run(self, what: str, counted: str) -> None:
        with self._on_a_stream():
            made = self._made(what)
            output = made.run()
            self.done[counted] += 1
            if self._random.random() < _CHECKED:
                self.done["checks"] += 1
                made.check(output)

    def _mistake(self) -> None:
        with self._on_a_stream():
            made = self._made()
            wrong = spoilt(self._random.choice, made)
            if wrong is None:
                return
            try:
                made.function(**wrong)
            except NormforgeError:
                made.check_untouched(refused=True)
            else:
                raise AssertionError(f"a call was taken that is illegal: {wrong}")
        self.done["refused calls"] += 1

    def _graph(self) -> None:
        """Capture a call, replay it over other values, and hold the last replay to the oracle."""
        stream = self._random.choice(self._streams)
        with torch.cuda.stream(stream):
            made = self._made()
            # Triton loads a kernel when it first runs, which no capture may do.
            made.run()
            made.refill(self._random.randrange(1 << 16))
        graph = torch.cuda.CUDAGraph()
        with self._gate.alone():
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                output = made.run()
        self.done["graphs captured"] += 1
        with self._gate.shared(), torch.cuda.stream(stream):
            for _ in range(_REPLAYS):
                made.refill(self._random.randrange(1 << 16))
                graph.replay()
                self.done["graph replays"] += 1
            made.check(output)
            self.done["checks"] += 1
            stream.synchronize()
        with self._gate.alone():
            # Its memory goes back while nothing else runs.
            torch.cuda.synchronize(self._device)
            del output, graph
