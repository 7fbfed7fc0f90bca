"""Kernels that ran on a GPU during marked calls, read from the Chrome trace of torch's profiler.

Of the profiler's answers that trace alone states registers, shared memory, grids and occupancy. A launch belongs to the
call during which the host asked for it, whichever thread did: autograd launches from threads of its own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# The trace's categories: a range of `record_function`, what the host asked for, and what ran.
_RANGE = "user_annotation"
_ASKED = ("cuda_runtime", "cuda_driver")
_RAN = ("kernel", "gpu_memcpy", "gpu_memset")


class TraceError(ValueError):
    """A trace does not say what ran in each call."""


@dataclass(frozen=True)
class Kernel:
    """A kernel as it was launched, or a copy or fill by the driver; None is what the profiler does not state of it.

    Attributes:
        name: the compiled kernel's.
        grid: programs in each dimension.
        threads: threads of a program.
        registers: of a thread.
        shared_bytes: of a program.
        occupancy_percent: the share of a multiprocessor's threads that the resident programs fill, estimated from
            registers, shared memory and the grid. What happened at run time is not in it.
        programs_per_sm: the grid's programs over the multiprocessors, resident at once or one after another.
    """

    name: str
    grid: tuple[int, ...] | None
    threads: int | None
    registers: int | None
    shared_bytes: int | None
    occupancy_percent: int | None
    programs_per_sm: float | None


class Launch(NamedTuple):
    """One launch, and the microseconds that it ran."""

    kernel: Kernel
    us: float


def calls_in(trace: Mapping[str, Any], mark: str) -> list[list[Launch]]:
    """Return what each marked call launched, in the order of launches.

    Args:
        trace: the parsed JSON.
        mark: the name of the ranges, one a call, that do not overlap.

    Raises:
        TraceError: something ran and it is not known who asked for it, or a call launched nothing.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["cat"] == _RANGE and event["name"] == mark
    )
    starts = [start for start, _ in ranges]
    asked = {event["args"]["correlation"]: event["ts"] for event in events if event["cat"] in _ASKED}
    calls: list[list[Launch]] = [[] for _ in ranges]
    for event in sorted((event for event in events if event["cat"] in _RAN), key=lambda event: float(event["ts"])):
        when = asked.get(event["args"].get("correlation"))
        if when is None:
            raise TraceError(f"the profiler does not say who launched {event['name']}, so it belongs to no call")
        position = bisect_right(starts, when) - 1
        if position >= 0 and when <= ranges[position][1]:
            calls[position].append(Launch(_kernel(event), float(event["dur"])))
    if not calls or not all(calls):
        raise TraceError(
            f"the profiler saw something run in {sum(map(bool, calls))} of {len(calls)} calls; its warnings, printed "
            "before this, say whether CUPTI could not start: another profiler may be attached to the GPU"
        )
    return calls


def _kernel(event: Mapping[str, Any]) -> Kernel:
    args = event["args"]
    grid, block = args.get("grid"), args.get("block")
    occupancy, programs = _number(args.get("est. achieved occupancy %")), _number(args.get("blocks per SM"))
    return Kernel(
        event["name"],
        None if grid is None else tuple(grid),
        None if block is None else math.prod(block),
        args.get("registers per thread"),
        args.get("shared memory"),
        # The profiler's -100 is an estimate that it could not make.
        None if occupancy is None or occupancy < 0 else int(occupancy),
        programs,
    )


def _number(value: float | str | None) -> float | None:
    # Kineto writes "inf" where it does not know how many multiprocessors there are.
    return None if value is None or math.isinf(float(value)) else float(value)
