"""Measure what a process holds of the host's memory, of the device's and of plans, and whether that grows."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from normforge.selection import dispatch

MIB = 1 << 20


@dataclass(frozen=True)
class Held:
    """The memory and plans of a process at one time, while nothing runs.

    Attributes:
        calls: calls made until then.
        rss: bytes of the host's memory.
        free: bytes of those that malloc holds free, in its arenas; see `_free_in_arenas`.
        allocated: bytes of tensors on the device.
        reserved: bytes that torch's allocator holds there, after it gave back what it could.
        device: bytes of the device in use by anyone.
        plans: calls known by their keys.
        objects: those of Python that its collector tracks.
    """

    calls: int
    rss: int
    free: int
    allocated: int
    reserved: int
    device: int
    plans: int
    objects: int


def held(device: torch.device, calls: int) -> Held:
    """Measure, once all that can be freed is."""
    gc.collect()
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    on_device = (0, 0, 0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        on_device = (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total - free)
    return Held(calls, rss, _free_in_arenas(), *on_device, len(dispatch.plans), len(gc.get_objects()))


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`, whose fields are all sizes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


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
class Quantity:
    """Something held: how it is read and shown, and how much more of it the last window may have than the first.

    Attributes:
        name: for people.
        read: from `Held`.
        unit: what one shown is of those read.
        slack: how much may be added; `share` of the first window's besides. None is anything: it is shown for people.
        share: how much of the first window may be added.
    """

    name: str
    read: Callable[[Held], int]
    unit: int
    slack: float | None
    share: float = 0.0


# Host memory: what is resident, but for what malloc holds free. Python's objects: the threads' own few, and what hangs
# on plans, which are bounded themselves. A leak of one plan, tensor or graph a call is far beyond these.
QUANTITIES = (
    Quantity("host in use, MiB", lambda held: held.rss - held.free, MIB, 8 * MIB, 0.005),
    Quantity("held free by malloc, MiB", lambda held: held.free, MIB, None),
    Quantity("device allocated, MiB", lambda held: held.allocated, MIB, 1 * MIB),
    Quantity("device reserved, MiB", lambda held: held.reserved, MIB, 8 * MIB),
    Quantity("device in use, MiB", lambda held: held.device, MIB, 64 * MIB),
    Quantity("plans", lambda held: held.plans, 1, 8, 0.05),
    Quantity("Python objects", lambda held: held.objects, 1, 5000, 0.01),
)


@dataclass(frozen=True)
class Growth:
    """A quantity's medians in the first and last window after warm-up, and its slope over all of them, per call."""

    quantity: Quantity
    start: int
    first: float
    last: float
    slope: float

    @property
    def ok(self) -> bool:
        """Return True if the last window holds no more than the first but for the slack."""
        return (
            self.quantity.slack is None
            or self.last - self.first <= self.quantity.slack + self.quantity.share * self.first
        )


def growths(before: Held, samples: Sequence[Held]) -> list[Growth]:
    """Compare the first and the last third of the samples taken after warm-up."""
    third = max(1, len(samples) // 3)
    found = []
    for quantity in QUANTITIES:
        values = [float(quantity.read(sample)) for sample in samples]
        calls = [float(sample.calls) for sample in samples]
        slope = statistics.linear_regression(calls, values).slope if len(set(calls)) > 1 else 0.0
        medians = statistics.median(values[:third]), statistics.median(values[-third:])
        found.append(Growth(quantity, quantity.read(before), *medians, slope))
    return found
