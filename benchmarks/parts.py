"""The host's share of a call: microseconds of whole eager calls, and of the parts of three of normforge's.

A round is 50 calls of one function, after the GPU has been waited for. Every function has its round in turn, many times
over, so that a slow minute of the machine hits all alike. A call of nothing is taken off each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from normforge.errors import DeviceError
from normforge.tools.machine import find_machine

from .beside import load_beside
from .call_parts import WHOLE, WHOLE_OF, Part, make_parts
from .cells import Cell, Norm, Task
from .chosen import RESULTS
from .environment import describe, folder_name, revision_of
from .errors import UsageError
from .inputs import make_inputs
from .progress import progress_over
from .results import save_rows
from .take_apart import nothing
from .timing import Call, summarise

SUITE = "parts"
SUM, THE_WHOLE = "sum of the parts", "the whole call"

_CALLS, _FEWEST_PASSES = 50, 5
# The interpreter takes some 10 ms a call, and its times mean nothing.
_INTERPRETED_CALLS, _INTERPRETED_PASSES = 1, 2
_SHAPE, _INTERPRETED_SHAPE = (16, 4096), (2, 64)

NOTHING = Part("", "a call of nothing", nothing)

# Microseconds a call, pass by pass.
Times = list[float]
# Their median, 20th percentile and least, in microseconds.
Figures = tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One function, less what it holds besides its part, or the sum of a group's parts, column by column.

    Attributes:
        group: `call_parts.WHOLE`, or the call that it is a part of.
        part: its name.
        us: the median of the passes in microseconds.
        us_p20: their 20th percentile.
        us_min: the least of them.
        passes: how many there were.
    """

    group: str
    part: str
    us: float
    us_p20: float
    us_min: float
    passes: int


def parts(options: argparse.Namespace, _: list[str]) -> int:
    """Run the verb: measure, print a table, and write `parts.csv`.

    In Triton's interpreter no launches are timed.

    Raises:
        UsageError: there is no device, or normforge's calls cannot be taken apart.
    """
    try:
        machine = find_machine()
    except DeviceError as error:
        raise UsageError(str(error)) from None
    interpreted = machine.interpreted
    shape = _INTERPRETED_SHAPE if interpreted else _SHAPE
    header = describe(machine, (), options.revision)
    header["shape"] = "×".join(map(str, shape))
    cell = Cell(Task.ADD_QUANT, Norm.LAYER, *shape, out_dtype="int8", smooth=True)
    calls, fewest = (_INTERPRETED_CALLS, _INTERPRETED_PASSES) if interpreted else (_CALLS, _FEWEST_PASSES)
    with tempfile.TemporaryDirectory() as scratch:
        beside = load_beside(options.beside, Path(scratch)) if options.beside else None
        if beside is not None:
            header["beside"] = options.beside_revision or revision_of(options.beside)
        found = make_parts(make_inputs(cell, machine.device), interpreted, beside)
        rows = summarised(measure(found, calls, options.seconds, fewest))
    save_rows(options.out or RESULTS / folder_name(machine), SUITE, header, Row, rows)
    print(table(rows))
    return 0


def measure(found: Sequence[Part], calls: int, seconds: float, fewest: int) -> dict[Part, Times]:
    """Time every part and a call of nothing in turn, in as many passes as the time holds.

    Args:
        found: what to time.
        calls: in a round.
        seconds: for all passes together.
        fewest: passes, whatever they take.

    Returns:
        Microseconds a call in each pass.
    """
    every = (*found, NOTHING)
    # The first fills caches, the allocator's among them, the second says how long one takes; neither counts.
    _one_pass(every, calls)
    start = time.perf_counter()
    _one_pass(every, calls)
    passes = max(fewest, int(seconds / (time.perf_counter() - start)))
    times: dict[Part, Times] = {part: [] for part in every}
    for _ in progress_over(range(passes), what=SUITE, unit="pass"):
        for part, us in _one_pass(every, calls).items():
            times[part].append(us)
    return times


def summarised(times: dict[Part, Times]) -> list[Row]:
    """Return a row per part, without the parts that it contains, and per group their sum and the whole call."""
    raw = {part: _statistics(of_part) for part, of_part in times.items()}
    by_name = {(part.group, part.name): part for part in times}
    own = {
        part: _less(figures, raw[NOTHING if part.less is None else by_name[part.group, part.less]])
        for part, figures in raw.items()
        if part is not NOTHING
    }
    passes = len(times[NOTHING])
    rows = []
    for group in dict.fromkeys(part.group for part in own):
        members = {part: figures for part, figures in own.items() if part.group == group}
        rows += [_row(group, part.name, figures, passes) for part, figures in members.items()]
        if group in WHOLE_OF:
            rows.append(_row(group, SUM, tuple(map(sum, zip(*members.values(), strict=True))), passes))
            rows.append(_row(group, THE_WHOLE, own[by_name[WHOLE, WHOLE_OF[group]]], passes))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the results as a table."""
    headers = ["µs on the host", "", "median", "20th percentile", "least"]
    shown = []
    group = ""
    for row in rows:
        figures = (f"{us:.2f}" for us in (row.us, row.us_p20, row.us_min))
        shown.append(("" if row.group == group else row.group, row.part, *figures))
        group = row.group
    aligned = ("left", "left", "right", "right", "right")
    return tabulate(shown, headers, tablefmt="github", disable_numparse=True, colalign=aligned)


def _one_pass(every: Sequence[Part], calls: int) -> dict[Part, float]:
    return {part: _round(part.call, calls) for part in every}


def _round(call: Call, calls: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    turns = range(calls)
    start = time.perf_counter()
    for _ in turns:
        call()
    return (time.perf_counter() - start) / calls * 1e6


def _statistics(times: Times) -> Figures:
    spread = summarise(times)
    return spread.median, spread.p20, min(times)


def _less(figures: Figures, others: Figures) -> Figures:
    # Statistic by statistic: what interrupts the shorter of two in one pass would leave less than nothing of the other.
    return tuple(figure - other for figure, other in zip(figures, others, strict=True))


def _row(group: str, name: str, figures: Figures, passes: int) -> Row:
    us, us_p20, us_min = (round(figure, 3) for figure in figures)
    return Row(group, name, us, us_p20, us_min, passes)
