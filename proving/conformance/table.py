"""The few of all cases that the interpreter has time for, and cases by the kernels that they share."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from operator import attrgetter

from ..evidence import grouped
from .case import Case
from .suites import cases

# The interpreter runs a program at a time: lengths that cost it a fraction of a second, and a few longer ones.
_SHORT, _LONGEST = 2100, 20000
# Elements of an interpreted case that has more than two rows, and rows of any.
_FEW_ELEMENTS, _FEW_ROWS = 256, 19


@cache
def interpreted() -> tuple[Case, ...]:
    """Return a slice for the interpreter, of a few rows each: every mode of every suite, and every length up to 20,000.

    The same cases each time, drawn so that modes that share their lists of lengths take different ones.
    """
    drawn = sorted(cases(), key=lambda case: zlib.crc32(case.id.encode()))
    kept: dict[str, Case] = {}
    modes: set[object] = set()
    lengths: set[object] = set()
    for longest in (_SHORT, _LONGEST):
        for case in drawn:
            length = (case.suite, case.n, bool(case.arriving))
            mode = (case.suite, case.mode, case.weight)
            wanted = mode not in modes if longest == _SHORT else length not in lengths
            if case.n <= longest and (wanted or mode not in modes):
                modes.add(mode)
                lengths.add(length)
                small = fewer_rows(case)
                kept.setdefault(small.id, small)
    return tuple(kept.values())


def fewer_rows(case: Case) -> Case:
    """Return the case with two rows, or with a few more if they are short."""
    *leading, n = case.shape
    most = min(_FEW_ROWS, max(2, _FEW_ELEMENTS // n)) if len(leading) == 1 else 2
    return replace(case, shape=(*(min(size, most) for size in leading), n))


def groups(chosen: Iterable[Case]) -> list[list[Case]]:
    """Cases that share kernels side by side, so that one process compiles them once; the longest rows first."""
    return sorted(grouped(chosen, attrgetter("kernels")).values(), key=lambda group: -group[0].n)
