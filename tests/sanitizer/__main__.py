"""`python -m tests.sanitizer`: compute-sanitizer's tools over calls that touch every kernel."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from .cells import ARCH, every
from .log import Log, read

TOOLS = {
    "memcheck": "reads and writes outside allocations, and at addresses that are not aligned",
    "racecheck": "accesses to shared memory that no barrier orders",
    "initcheck": "reads of global memory that nothing was written to",
    "synccheck": "barriers that not all threads come to",
}
# Where CUDA's toolkit puts it.
_PLACES = ("/usr/local/cuda/bin",)
_ROOT = Path(__file__).resolve().parents[2]
_WORKER = (sys.executable, "-m", "tests.sanitizer.worker")
# Seconds for one process; the tools slow kernels down 10 to 100 times.
_LIMIT = 540


@dataclass(frozen=True)
class Outcome:
    """What one tool found in all its processes."""

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
        """Whether every call was watched and nothing was found."""
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
    options = _parser().parse_args(arguments)
    if options.list:
        print("\n".join(cell.name for cell in every()))
        return 0
    sanitizer = _find()
    if sanitizer is None:
        print(
            "compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin; it comes with CUDA's toolkit "
            "(cuda-sanitizer), and without it nothing was checked",
            file=sys.stderr,
        )
        return 2
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU was found, and the tools watch nothing else", file=sys.stderr)
        return 2
    runs = _Runs(options.device, options.jobs, options.log)
    # Compiled now, without a tool, kernels are found in Triton's cache on disk.
    print(f"compiling what {len(every())} calls take", file=sys.stderr)
    plain = runs.all("plain", ())
    problems = [why for log in plain for why in log.broken]
    if problems or not all(log.ended for log in plain):
        print("\n".join(("without a tool, calls fail or a process ends early:", *problems)), file=sys.stderr)
        return 1
    outcomes = []
    for tool in options.tool or TOOLS:
        print(f"{tool} looks for {TOOLS[tool]}", file=sys.stderr)
        began = time.monotonic()
        logs = runs.all(tool, (sanitizer, "--tool", tool, "--print-limit", "100000"))
        outcomes.append(Outcome(tool, logs, time.monotonic() - began))
    print(_table(outcomes, "simple"))
    for outcome in outcomes:
        for line in outcome.found:
            print(f"{outcome.tool}: {line}")
    if options.markdown is not None:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(markdown(outcomes, _header(sanitizer, options.revision)))
    return 0 if all(outcome.clean for outcome in outcomes) else 1


@dataclass(frozen=True)
class _Runs:
    """Processes that make the calls, each its share.

    Attributes:
        device: where.
        jobs: how many processes at once.
        log: a folder for what they print, or None.
    """

    device: str
    jobs: int
    log: Path | None

    def all(self, name: str, command: tuple[str, ...]) -> tuple[Log, ...]:
        """Make every call, in processes that a command watches."""
        with ThreadPoolExecutor(self.jobs) as pool:
            return tuple(pool.map(lambda part: self._one(name, command, part), range(1, self.jobs + 1)))

    def _one(self, name: str, command: tuple[str, ...], part: int) -> Log:
        worker = (*_WORKER, "--share", f"{part}/{self.jobs}", "--device", self.device)
        # Without a cache each tensor is an allocation of its own, exactly as long, and never written before.
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(
                (*command, *worker),
                cwd=_ROOT,
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
        if self.log is not None:
            self.log.mkdir(parents=True, exist_ok=True)
            (self.log / f"{name}_{part}.log").write_text(text)
        return read(text)


def _find() -> str | None:
    found = (shutil.which("compute-sanitizer", path=path) for path in (None, *_PLACES))
    return next((path for path in found if path), None)


def _header(sanitizer: str, revision: str | None) -> dict[str, str]:
    # Late, because they import Triton, which has to find the interpreter turned on or off.
    from benchmarks.environment import describe
    from normforge.tools.machine import find_machine

    header = describe(find_machine(), (), revision)
    done = subprocess.run((sanitizer, "--version"), capture_output=True, text=True, check=False)
    version = next((line for line in done.stdout.splitlines() if line.startswith("Version")), "not known")
    return {**header, "compute-sanitizer": version.removeprefix("Version ")}


def _table(outcomes: Sequence[Outcome], style: str) -> str:
    rows = [
        (o.tool, o.made, len(o.found), o.others, f"{o.seconds:.0f}", "clean" if o.clean else "not clean")
        for o in outcomes
    ]
    return tabulate(rows, ("tool", "calls", "errors", "of other kernels", "s", ""), style)


def markdown(outcomes: Sequence[Outcome], header: Mapping[str, str]) -> str:
    """The document."""
    tools = tabulate([(tool, TOOLS[tool]) for tool in TOOLS], ("tool", "looks for"), "github")
    names = "\n".join(f"- `{cell.name}`" for cell in every())
    found = [f"- {outcome.tool}: {line}" for outcome in outcomes for line in outcome.found]
    parts = (
        "# Sanitizer",
        "Read this to know what NVIDIA's compute-sanitizer says of every kernel of the committed table, and of "
        "kernels beside it: dropout, modulation, gates and GroupNorm. `make sanitize` runs it and writes this file.",
        "Run on " + ", ".join(f"{name} {value}" for name, value in header.items()) + ".",
        _table(outcomes, "github"),
        *(["## What was found", "\n".join(found)] if found else []),
        "## What is looked for",
        tools,
        "racecheck knows shared memory alone: that programs which share a row see what the others left in global "
        "memory is for tests of results. torch's allocator keeps no memory (`PYTORCH_NO_CUDA_MEMORY_CACHING=1`), so "
        "that each tensor is an allocation of its own, exactly as long as it is. Reports of kernels that are not "
        "normforge's, torch's copies say, are counted beside and are no errors here; they are not kept from the "
        "tools, because initcheck has to see what they write. What else a tool reports is an error. Calls of CUDA's "
        "API that fail are left out: torch asks drivers for what they may not have, and a launch of ours that fails "
        "raises, and is an error.",
        "## What is called",
        f"The calls are made from the table of `{ARCH}`: a short row for each kernel text, each kernel with each type "
        "of x, and each class of tiles (for few rows or many, on their way to shared memory, kept, several programs a "
        "multiprocessor). Rows of odd lengths, strides and starts follow, and heads of packed tensors, in place too, "
        "whose last element is the last of its allocation. Calls named `layer_…`, `rms_…` and `group_…` are "
        "those of the functional API with their gradients, of each pipeline that its kernels have without a table of "
        "tiles.",
        names,
    )
    return "\n\n".join(parts) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitizer", description="Run compute-sanitizer over calls that touch every kernel."
    )
    parser.add_argument("--list", action="store_true", help="print the calls and make none")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only this one; may be given again")
    parser.add_argument("--jobs", type=int, default=8, help="processes, which share the GPU (default 8)")
    parser.add_argument("--log", type=Path, metavar="FOLDER", help="keep there what each process printed")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the document there, docs/sanitizer.md say")
    parser.add_argument("--revision", help="what the document calls this revision (default: git's)")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
