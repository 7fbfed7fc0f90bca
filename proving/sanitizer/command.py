"""`python -m proving sanitizer`: compute-sanitizer's tools over calls that touch every kernel."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from .. import parts
from ..evidence import ROOT, Table, conclude, markdown, parser_of
from .cells import every
from .log import Log, read

TOOLS = {
    "memcheck": "reads and writes outside allocations, and at addresses that are not aligned",
    "racecheck": "accesses to shared memory that no barrier orders",
    "initcheck": "reads of global memory that nothing was written to",
    "synccheck": "barriers that not all threads come to",
}
# Where CUDA's toolkit puts it.
_PLACES = ("/usr/local/cuda/bin",)
_WORKER = (sys.executable, "-m", "proving.sanitizer.worker")
# Seconds for one process; the tools slow kernels down 10 to 100 times.
_LIMIT = 540


@dataclass(frozen=True)
class Outcome:
    """The findings of one tool in all its processes."""

    tool: str
    logs: tuple[Log, ...]
    seconds: float

    @property
    def made(self) -> int:
        """Calls."""
        return sum(len(log.cells) for log in self.logs)

    @property
    def found(self) -> list[str]:
        """Whatever is wrong, a line each."""
        lines = [f"{report.cell}: {report.what}; {report.where}" for log in self.logs for report in log.errors]
        lines += [f"{why} (it was not watched)" for log in self.logs for why in log.broken]
        lines += [
            f"a process ended after {len(log.cells)} calls, at {log.cells[-1] if log.cells else 'none'}, "
            + ("and the tool told no sum" if log.ended else "before its last one")
            for log in self.logs
            if not log.complete
        ]
        return lines

    @property
    def clean(self) -> bool:
        """Return True if every call was watched and nothing was found."""
        return self.made == len(every()) and not self.found

    @property
    def others(self) -> int:
        """Reports of kernels that are not this project's."""
        return sum(not report.ours for log in self.logs for report in log.reports)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tools.

    Returns:
        0 if all are clean, 1 if not, 2 if there is no compute-sanitizer or no GPU.
    """
    parser = parser_of("sanitizer", "Run compute-sanitizer over calls that touch every kernel; a case is a tool.")
    parser.add_argument("--log", type=Path, metavar="FOLDER", help="keep there what each process printed")
    # The processes share the GPU.
    parts.add_options(parser, jobs=8)
    options = parser.parse_args(arguments)
    tools = parts.chosen({tool: tool for tool in TOOLS}, parser, options, TOOLS.__getitem__)
    places = (shutil.which("compute-sanitizer", path=path) for path in (None, *_PLACES))
    sanitizer = next(filter(None, places), None)
    if sanitizer is None:
        print(
            "compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin; it comes with CUDA's toolkit "
            "(cuda-sanitizer), and without it nothing was checked",
            file=sys.stderr,
        )
        return 2
    if not torch.cuda.is_available():
        print("no GPU was found, and the tools watch nothing else", file=sys.stderr)
        return 2
    # Compiled now, without a tool, kernels are found in Triton's cache on disk.
    print(f"compiling what {len(every())} calls take", file=sys.stderr)
    plain = _all("plain", (), options)
    problems = [why for log in plain for why in log.broken]
    if problems or not all(log.ended for log in plain):
        print("\n".join(("without a tool, calls fail or a process ends early:", *problems)), file=sys.stderr)
        return 1
    header = _header(sanitizer, options.revision)

    def watched(due: Sequence[str]) -> Generator[tuple[str, Outcome], None, None]:
        for tool in due:
            print(f"{tool} looks for {TOOLS[tool]}", file=sys.stderr)
            began = time.monotonic()
            logs = _all(tool, (sanitizer, "--tool", tool, "--print-limit", "100000"), options)
            yield tool, Outcome(tool, logs, time.monotonic() - began)

    found = parts.run(tools, watched, options, header)
    outcomes = [*found.results.values()]
    conclude(options, "sanitizer", table(outcomes, header), summary, left=found.left)
    for outcome in outcomes:
        for line in outcome.found:
            print(f"{outcome.tool}: {line}")
    return 0 if all(outcome.clean for outcome in outcomes) and not found.left else 1


def _all(name: str, command: tuple[str, ...], options: argparse.Namespace) -> tuple[Log, ...]:
    """Make every call, in processes that a command watches, each its share."""
    with ThreadPoolExecutor(options.jobs) as pool:
        return tuple(pool.map(partial(_one, name, command, options), range(1, options.jobs + 1)))


def _one(name: str, command: tuple[str, ...], options: argparse.Namespace, part: int) -> Log:
    # Without a cache each tensor is an allocation of its own, exactly as long, and never written before.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            (*command, *_WORKER, str(part), str(options.jobs)),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=_LIMIT,
        )
        text = done.stdout
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
    if options.log is not None:
        options.log.mkdir(parents=True, exist_ok=True)
        (options.log / f"{name}_{part}.log").write_text(text)
    return read(text)


def _header(sanitizer: str, revision: str | None) -> dict[str, str]:
    # Late, because they import Triton, which has to find the interpreter turned on or off.
    from benchmarks.environment import describe
    from normforge.tools.machine import find_machine

    header = describe(find_machine(), (), revision)
    done = subprocess.run((sanitizer, "--version"), capture_output=True, text=True, check=False)
    version = next((line for line in done.stdout.splitlines() if line.startswith("Version")), "not known")
    return {**header, "compute-sanitizer": version.removeprefix("Version ")}


def _counts(outcome: Outcome) -> tuple[str, ...]:
    counts = (outcome.made, len(outcome.found), outcome.others, f"{outcome.seconds:.0f}")
    return (*map(str, counts), "clean" if outcome.clean else "not clean")


# Reports of kernels that are not normforge's, torch's copies for example, are counted and are no errors.
_COUNTS = ("calls", "errors", "of other kernels", "seconds", "verdict")


def table(outcomes: Sequence[Outcome], header: Mapping[str, str]) -> Table:
    """Return the full table: a row per call, with the errors that each tool found; the tools' counts in the header."""
    found = {
        outcome.tool: Counter(report.cell for log in outcome.logs for report in log.errors) for outcome in outcomes
    }
    made = {outcome.tool: {cell for log in outcome.logs for cell in log.cells} for outcome in outcomes}
    rows = [
        {"call": cell.name} | {tool: str(found[tool][cell.name]) if cell.name in made[tool] else "" for tool in found}
        for cell in every()
    ]
    counts = {outcome.tool: ", ".join(_counts(outcome)) for outcome in outcomes}
    return Table({**header, **counts}, ("call", *found), rows)


def summary(table: Table) -> str:
    """Return the section of the page: a row per tool, and the calls with errors."""
    tools = [tool for tool in table.columns if tool != "call"]
    header = {name: value for name, value in table.header.items() if name not in tools}
    lines = [(tool, TOOLS[tool], *table.header[tool].split(", ")) for tool in tools]
    parts = [replace(table, header=header).where, markdown(("tool", "looks for", *_COUNTS), lines)]
    parts += [
        f"- {tool}: `{row['call']}`, {f'{row[tool]} errors' if row[tool] else 'not called'}"
        for tool in tools
        for row in table.rows
        if row[tool] != "0"
    ]
    return "\n\n".join(parts)
