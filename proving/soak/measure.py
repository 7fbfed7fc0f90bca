"""Measure what a process holds of the host's memory, of the device's and of plans, and whether that grows."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from normforge.selection import dispatch

MIB = 1 << 20


# What a process holds, and how much more of it the last window may hold than the first: so much, and such a share of
# the first window's. None is anything. Host memory is what is resident, but for what malloc holds free in its arenas;
# see `_free_in_arenas`. Python's objects are the threads' own few, and what hangs on plans, which are bounded
# themselves. A leak of one plan, tensor or graph a call is far beyond these.
SLACK: Mapping[str, tuple[float, float] | None] = {
    "host in use, MiB": (8, 0.005),
    "held free by malloc, MiB": None,
    "device allocated, MiB": (1, 0.0),
    "device reserved, MiB": (8, 0.0),
    "device in use, MiB": (64, 0.0),
    "plans": (8, 0.05),
    "Python objects": (5000, 0.01),
}

# By the names of `SLACK`, while nothing runs; and the calls made until then.
Held = Mapping[str, float]
CALLS = "calls"


def held(device: torch.device, calls: int) -> Held:
    """Measure, once all that can be freed is."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    free, on_device = _free_in_arenas(), (0, 0, 0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        unused, total = torch.cuda.mem_get_info(device)
        on_device = (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total - unused)
    values = [memory / MIB for memory in (resident - free, free, *on_device)]
    return {**dict(zip(SLACK, (*values, len(dispatch.plans), len(gc.get_objects())), strict=True)), CALLS: calls}


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`, ten sizes: of what is free, and of eight other things before it."""

    _fields_ = [("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


def _free_in_arenas() -> int:
    """Return the bytes of glibc's arenas, of all threads, that are not allocated; 0 where there is no glibc 2.33.

    An arena is given back from its end alone, so that what threads free between two blocks that stay is kept. On an
    H200 a soak's resident memory grew by 2.8 MiB per 1000 calls and 2.7 of them were this, while what was allocated
    stayed within 0.03; it came only of steps, calls and captures mixed, and with MALLOC_ARENA_MAX=1 it came to an end.
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo2.restype = _Mallinfo2
    return int(mallinfo2().fordblks)


@dataclass(frozen=True)
class Growth:
    """Medians of something held in the first and last window after warm-up, and its slope over all of them, per call.

    Attributes:
        what: a name of `SLACK`.
        start: the value before any call.
        first: the median in the first window.
        last: the median in the last window.
        slope: the growth per call.
    """

    what: str
    start: float
    first: float
    last: float
    slope: float

    @property
    def ok(self) -> bool:
        """Return True if the last window holds no more than the first but for the slack."""
        slack = SLACK[self.what]
        return slack is None or self.last - self.first <= slack[0] + slack[1] * self.first


def growths(before: Held, samples: Sequence[Held]) -> list[Growth]:
    """Compare the first and the last third of the samples taken after warm-up."""
    third = max(1, len(samples) // 3)
    found = []
    for what in SLACK:
        values, calls = ([sample[name] for sample in samples] for name in (what, CALLS))
        slope = statistics.linear_regression(calls, values).slope if len(set(calls)) > 1 else 0.0
        medians = statistics.median(values[:third]), statistics.median(values[-third:])
        found.append(Growth(what, before[what], *medians, slope))
    return found
