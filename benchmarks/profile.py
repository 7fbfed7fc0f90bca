"""The kernels that calls of the benchmark's cells launch, as torch's profiler shows them.

Inputs and calls are those of `run`, and L2 is overwritten before a call where `run` does it; outputs are not checked
again. What `run` times in CUDA graphs is called eagerly here, with L2 warm as there: a kernel by itself takes as long
either way, and the gaps between kernels, which a graph makes short, are in no figure here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import profiler

from normforge.kernels.gpu import target_of
from normforge.kernels.obtain import obtain, obtained
from normforge.tools.timing import FLUSH_BYTES

from .cells import Cell, Method, Suite
from .chosen import RESULTS, matching, of_seed
from .device_trace import Kernel, Launch, TraceError, calls_in
from .environment import describe, find_gpu, folder_name
from .errors import UsageError
from .inputs import Inputs, make_inputs
from .progress import progress_over
from .provider import Provider
from .providers import find_providers
from .results import OK, make_row, save_rows
from .runner import first_line, prepare, release
from .suites import SUITES
from .timing import Call, summarise

SUITE = "profile"

MARK = "benchmarks.profile: one call"
_WARM_UP, _CALLS = 3, 5
# Columns of a table; the files hold names as long as they are.
_LONGEST_NAME = 60
# Triton counts spills in 32-bit words.
_WORD_BYTES = 4


@dataclass(frozen=True)
class Row:
    """One kernel of a provider's call on a cell, or why there is none; None is what is not known.

    Attributes:
        suite: the cell's.
        cell: its id.
        provider: whose call.
        status: `ok`, or `fails: ` and the first line of why, and then nothing follows.
        bytes: bytes that the call has to move, as `run` counts them.
        call_us: what all the call's kernels took, in microseconds, the median of the calls.
        gb_per_s: bytes over that.
        kernel: its name; copies and fills by the driver have rows as well.
        launches: how often a call launched it.
        us: the median of its launches in microseconds.
        grid: programs in each dimension, joined by x.
        threads: threads of a program.
        registers: of a thread.
        spilled_bytes: bytes of a thread that registers did not hold; known of normforge's kernels.
        shared_bytes: of a program.
        occupancy_percent: estimated; `device_trace.Kernel` says of what; the next is estimated as well.
        programs_per_sm: the grid's programs over the multiprocessors.
    """

    suite: str
    cell: str
    provider: str
    status: str
    bytes: int
    call_us: float | None = None
    gb_per_s: float | None = None
    kernel: str = ""
    launches: int | None = None
    us: float | None = None
    grid: str = ""
    threads: int | None = None
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None
    occupancy_percent: int | None = None
    programs_per_sm: float | None = None


def profile(options: argparse.Namespace, _: list[str]) -> int:
    """Run the verb: profile, print a table, and write `profile.csv`, anew after each call.

    A provider that raises gets a row that says so, and the others go on.

    Raises:
        UsageError: there is no GPU or it was lost, or an option names nothing.
    """
    chosen = _choose(of_seed([SUITES[name] for name in options.suite], options.seed), options.only)
    present, absent = find_providers(options.providers)
    machine = find_gpu(SUITE)
    for name, reason in absent.items():
        print(f"skipped: {name} is not here ({reason})", file=sys.stderr)
    work = [(suite, cell, p) for suite, cell in chosen for p in present.values() if p.builder(cell) is not None]
    if not work:
        raise UsageError(f"none of --providers {' '.join(options.providers)} is here and offers one of the cells")
    header, out = describe(machine, present.values(), options.revision), options.out or RESULTS / folder_name(machine)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=machine.device).zero_
    rows: list[Row] = []
    for suite, cell, provider in progress_over(work, what=SUITE, unit="call"):
        before = flush if SUITES[suite].method is Method.COLD else lambda: None
        rows += profile_cell(suite, make_inputs(cell, machine.device), provider, before)
        save_rows(out, SUITE, header, Row, rows)
        _release(machine.device, cell, provider)
    print(table(rows))
    return 0


def profile_cell(suite: str, inputs: Inputs, provider: Provider, before: Call) -> list[Row]:
    """Profile a provider's call, with `before` run ahead of each, which counts for nothing.

    Returns:
        A row a kernel, or one that says why there is none.
    """
    cell = inputs.cell
    try:
        if provider.reset is not None:
            provider.reset()
        (call,) = prepare(provider, [inputs], None)
        calls = calls_in(record(call, before), MARK)
        return kernel_rows(suite, cell, provider.name, calls)
    except Exception as error:  # what a peer raises is a result, as it is for `run`
        failed = make_row(cell, provider.name, f"fails: {first_line(error)}")
        return [Row(suite, cell.id, provider.name, failed.status, failed.bytes)]


def record(call: Call, before: Call, calls: int = _CALLS) -> Any:
    """Run a call some times under the profiler, in ranges named `MARK`; the result is the parsed trace."""
    for _ in range(_WARM_UP):
        call()
    # Work that began before the profiler would end in its trace, where no call asked for it.
    torch.cuda.synchronize()
    activities = (profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA)
    with profiler.profile(activities=activities) as profiled:
        for _ in range(calls):
            before()
            with profiler.record_function(MARK):
                # The driver's clock may be some us off the profiler's; waits keep the call away from the range's ends.
                torch.cuda.synchronize()
                call()
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="normforge-profile-") as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return json.loads(path.read_bytes())


def kernel_rows(suite: str, cell: Cell, provider: str, calls: Sequence[Sequence[Launch]]) -> list[Row]:
    """Return a row per kernel, in the order of first launches.

    Raises:
        TraceError: the calls launched different things.
    """
    counts = Counter(launch.kernel for launch in calls[0])
    for call in calls[1:]:
        if Counter(launch.kernel for launch in call) != counts:
            raise TraceError(
                f"calls that should be alike launched {_names(calls[0])} once and {_names(call)} another time"
            )
    whole = make_row(cell, provider, OK, summarise([sum(launch.us for launch in call) for call in calls]))
    about = (suite, whole.cell, provider, OK, whole.bytes, whole.us, whole.gb_per_s)
    rows = []
    for kernel, launches in counts.items():
        us = round(median(launch.us for call in calls for launch in call if launch.kernel == kernel), 3)
        rows.append(
            Row(
                *about,
                kernel.name,
                launches,
                us,
                "x".join(map(str, kernel.grid or ())),
                kernel.threads,
                kernel.registers,
                spilled_bytes(kernel, cell.n),
                kernel.shared_bytes,
                kernel.occupancy_percent,
                kernel.programs_per_sm,
            )
        )
    return rows


def spilled_bytes(kernel: Kernel, n: int) -> int | None:
    """Return what Triton states of normforge's kernel by name, threads and N; None for no such kernel, or for several.

    Args:
        kernel: as it was launched.
        n: columns.
    """
    spilled = set()
    for key, device in obtained():
        target = target_of(torch.device("cuda", device))
        if (
            key.symbol == kernel.name
            and key.n == n
            and dict(key.options)["num_warps"] * target.warp_size == kernel.threads
        ):
            function = getattr(sys.modules[key.kernel.rpartition(":")[0]], key.symbol)
            spilled.add(obtain(key, function, target, device).n_spills * _WORD_BYTES)
    return spilled.pop() if len(spilled) == 1 else None


def table(rows: Sequence[Row]) -> str:
    """Return the results as a table."""
    headers = ["cell", "provider", "µs a call", "GB/s", "kernel", "launches", "µs", "grid", "threads", "registers"]
    headers += ["spilled B", "shared B", "occupancy %", "programs/SM"]
    shown: list[tuple[object, ...]] = []
    before = ("", "", "")
    for row in rows:
        call = (row.suite, row.cell, row.provider)
        about = (
            ("",) * 4 if call == before else (row.cell, row.provider, _fixed(row.call_us, 2), _fixed(row.gb_per_s, 0))
        )
        name = row.kernel if row.status == OK else row.status
        short = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
        own = (row.launches, _fixed(row.us, 2), row.grid, row.threads, row.registers, row.spilled_bytes)
        shown.append((*about, short, *own, row.shared_bytes, row.occupancy_percent, _fixed(row.programs_per_sm, 2)))
        before = call
    aligned = ("left", "left", "right", "right", "left", *("right",) * 9)
    return tabulate(shown, headers, tablefmt="github", disable_numparse=True, colalign=aligned)


def _choose(suites: Sequence[Suite], patterns: Sequence[str]) -> list[tuple[str, Cell]]:
    chosen = [(suite.name, cell) for suite in suites for cell in matching(suite.cells, patterns)]
    if not chosen:
        names = ", ".join(suite.name for suite in suites)
        raise UsageError(f"--only {' '.join(patterns)} matches no cell of {names}; see `python -m benchmarks list`")
    return chosen


def _release(device: torch.device, cell: Cell, provider: Provider) -> None:
    try:
        release(device)
    except Exception as error:
        raise UsageError(
            f"the GPU was lost to {provider.name} on {cell.id} ({first_line(error)}); what came before is saved, "
            "and --only or --providers without them goes on elsewhere"
        ) from None


def _names(call: Sequence[Launch]) -> str:
    return ", ".join(launch.kernel.name for launch in call)


def _fixed(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
