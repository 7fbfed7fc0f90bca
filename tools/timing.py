"""Time a call on a GPU: with a cold L2 cache, or without host time."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

# More than the L2 cache of any GPU today, and 0.25 ms of an H200's time: the host needs about 0.1 ms for a launch, and
# with 256 MiB (what triton.testing.do_bench writes) short kernels were timed at what the host takes.
FLUSH_BYTES = 2**30


def graph_ms(call: Callable[[], object], *, calls: int, repeat: int) -> float:
    """Return the median time of one call out of `calls` in a CUDA graph, replayed `repeat` times with a warm L2.

    The time of a short kernel without host time.
    """
    graph = torch.cuda.CUDAGraph()
    # torch.cuda.graph would collect garbage first, which takes longer than all that is measured here.
    with torch.Stream("cuda"):
        call()
        torch.cuda.synchronize()
        graph.capture_begin()
        for _ in range(calls):
            call()
        graph.capture_end()
    graph.replay()
    events = [(torch.Event(enable_timing=True), torch.Event(enable_timing=True)) for _ in range(repeat)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / calls


def median_ms(call: Callable[[], object], *, warmup: int, repeat: int) -> float:
    """Return the median time of `repeat` runs after `warmup` uncounted runs, by events on the current stream.

    L2 is overwritten before each run. That also keeps the GPU busy while the host prepares the launch, so host
    time is not counted.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(warmup):
        call()
    events = [(torch.Event(enable_timing=True), torch.Event(enable_timing=True)) for _ in range(repeat)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)
