"""How long calls take: three methods, each of which returns the times of single calls in microseconds.

COLD: events around each call, with L2 overwritten before it, so often that the GPU takes longer for that than the host
for the call: host time is not counted. A call that waits for the GPU itself is timed with its gaps.

GRAPH: a CUDA graph holds 20 calls that take turns on four sets of inputs, and a time is that of one replay divided by
20. Nothing is overwritten: what decoding normalises has just been written and lies in L2.

HOST: the wall clock around each call, while the GPU is waited for outside of it, often enough never to fall far behind.

On a CPU all three are the wall clock around a few calls: enough to try the benchmark, and nothing to publish.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch

from normforge.tools.timing import FLUSH_BYTES

from .cells import Method

Call = Callable[[], Any]

GRAPH_CALLS = 20
# Sets of inputs that a graph's calls take turns on.
INPUT_SETS = {Method.COLD: 1, Method.GRAPH: 4, Method.HOST: 1}

# The host is timed so often by itself, and may take so many times as long for a call once events are recorded too.
_HOST_TRIES = 5
_HOST_MARGIN = 1.5

_FEWEST, _MOST = 8, 200
_MOST_HOST_CALLS = 1000
_CALLS_BETWEEN_WAITS = 50
_CPU_CALLS = 2


class Spread(NamedTuple):
    """The median of some times, the 20th and the 80th percentile, and how many there were; microseconds."""

    median: float
    p20: float
    p80: float
    runs: int


def summarise(times: Sequence[float]) -> Spread:
    """Median and spread of times."""
    if len(times) == 1:
        return Spread(times[0], times[0], times[0], 1)
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return Spread(statistics.median(times), fifths[0], fifths[3], len(times))


def measure(method: Method, calls: Sequence[Call], device: torch.device, budget_ms: float) -> list[float]:
    """Return times of single calls by a method, as many as `budget_ms` holds; `calls` has one per set of inputs."""
    if device.type == "cpu":
        return _wall_clock(calls[0], _CPU_CALLS)
    return {Method.COLD: _cold, Method.GRAPH: _graph, Method.HOST: _host}[method](calls, budget_ms)


def _cold(calls: Sequence[Call], budget_ms: float) -> list[float]:
    (call,), flush, flush_ms = calls, _flush(torch.cuda.current_device()), _flush_ms(torch.cuda.current_device())
    call()
    torch.cuda.synchronize()
    flushes = flushes_ahead(statistics.median(_wall_clock(call, _HOST_TRIES)) / 1e3, flush_ms)

    def clear() -> None:
        for _ in range(flushes):
            flush.zero_()

    once = statistics.median(_events(call, 3, clear)) / 1e3
    # Clearing L2 costs time of the GPU as well.
    repeat = budget_ms / (once + flushes * flush_ms)
    return _events(call, _bounded(repeat), clear)


def flushes_ahead(host_ms: float, flush_ms: float) -> int:
    """How often L2 is to be overwritten before a call that takes the host so long, for the GPU to be behind it.

    Autograd's engine takes 0.2 to 0.3 ms of the host for some gradients; overwriting once takes an H200 0.25 ms.
    """
    return max(1, math.ceil(_HOST_MARGIN * host_ms / flush_ms))


def _graph(calls: Sequence[Call], budget_ms: float) -> list[float]:
    # torch declares no types for its streams.
    make_stream: Callable[[], Any] = torch.cuda.Stream
    stream = make_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in islice(cycle(calls), GRAPH_CALLS):
            call()
    once = statistics.median(_events(graph.replay, 3, None)) / 1e3
    times = _events(graph.replay, _bounded(budget_ms / once), None)
    return [replay / GRAPH_CALLS for replay in times]


def _host(calls: Sequence[Call], budget_ms: float) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + budget_ms / 1e3
    # The first ones fill caches, the allocator's among them.
    _wall_clock(calls[0], _CALLS_BETWEEN_WAITS)
    while len(times) < _CALLS_BETWEEN_WAITS or (len(times) < _MOST_HOST_CALLS and time.perf_counter() < end):
        torch.cuda.synchronize()
        times += _wall_clock(calls[0], _CALLS_BETWEEN_WAITS)
    torch.cuda.synchronize()
    return times


def _events(call: Call, repeat: int, before: Call | None) -> list[float]:
    events = [(torch.Event(enable_timing=True), torch.Event(enable_timing=True)) for _ in range(repeat)]
    # Keeps the GPU busy while the host gets ahead of it.
    _flush(torch.cuda.current_device()).zero_()
    for start, end in events:
        if before is not None:
            before()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def _wall_clock(call: Call, repeat: int) -> list[float]:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def _bounded(repeat: float) -> int:
    return min(_MOST, max(_FEWEST, int(repeat)))


@cache
def _flush(device: int) -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=f"cuda:{device}")


@cache
def _flush_ms(device: int) -> float:
    return statistics.median(_events(_flush(device).zero_, 5, None)) / 1e3
