"""Start-up: from the start of a process to its first training step, with and without what was compiled before.

Each figure is a process of its own. Triton's cache is a folder of its own too: an empty one, one that a process filled
before, or one that holds the C launchers which Triton builds, and no kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tabulate import tabulate

from normforge.kernels.gpu import target_of

from .chosen import RESULTS
from .environment import ROOT, describe, find_gpu, folder_name
from .errors import UsageError
from .first_result import N
from .progress import progress_over
from .results import save_rows

SUITE = "startup"
_MODES = ("ln_fwd_bf16_mv", "ln_bwd_bf16")

Environment = dict[str, str]


@dataclass(frozen=True)
class Way:
    """One way to start.

    Attributes:
        name: for files.
        title: for people.
        what: whose operator runs.
        kept: whether processes share Triton's cache, which another has filled before; otherwise each has an empty one.
        ahead: whether the folder of kernels compiled ahead of time is in use.
    """

    name: str
    title: str
    what: str = "normforge"
    kept: bool = False
    ahead: bool = False


WAYS = (
    Way("torch", "torch's own operator", what="torch", kept=True),
    Way("cold", "nothing compiled before"),
    Way("warm", "Triton's cache filled by an earlier process", kept=True),
    Way("aot", "compiled ahead of time, first process on the machine", ahead=True),
    Way("aot-again", "compiled ahead of time, later processes", kept=True, ahead=True),
)


@dataclass(frozen=True)
class Sample:
    """One process: seconds to the first result, and those of them after torch and the device were ready."""

    total_s: float
    norm_s: float


@dataclass(frozen=True)
class Row:
    """The processes of one way: medians, and the extremes of the part that is normforge's own."""

    way: str
    title: str
    runs: int
    total_s: float
    norm_s: float
    norm_s_min: float
    norm_s_max: float


def startup(options: argparse.Namespace, _: list[str]) -> int:
    """Run the verb: measure, print a table, and write `startup.csv`.

    Raises:
        UsageError: there is no GPU, or a process failed.
    """
    machine = find_gpu("startup")
    header = describe(machine, (), options.revision)
    with tempfile.TemporaryDirectory(prefix="normforge-startup-") as base:
        arch = target_of(machine.device).arch
        rows = measure(Path(base), options.runs, lambda folder: compile_ahead(folder, arch), start)
    save_rows(options.out or RESULTS / folder_name(machine), SUITE, header, Row, rows)
    print(table(rows))
    return 0


def measure(
    base: Path,
    runs: int,
    prepare: Callable[[Path], object],
    run: Callable[[Way, Environment], Sample],
) -> list[Row]:
    """Run every way so many times, in turns, so that a slow minute of the machine is no single way's.

    Args:
        base: an empty folder for caches.
        runs: how many processes count for each way.
        prepare: compiles kernels ahead of time into a folder.
        run: runs one process.
    """
    kernels = base / "kernels"
    prepare(kernels)
    for way in WAYS:
        # Fills caches, among them the operating system's, of torch's libraries.
        if way.kept:
            run(way, environment(way, base, "kept", kernels) | {"NORMFORGE_FROZEN": "0"})
    turns = [(way, turn) for turn in range(runs) for way in WAYS]
    samples: dict[str, list[Sample]] = {way.name: [] for way in WAYS}
    for way, turn in progress_over(turns, what="start", unit="process"):
        samples[way.name].append(run(way, environment(way, base, "kept" if way.kept else str(turn), kernels)))
    return [_row(way, samples[way.name]) for way in WAYS]


def environment(way: Way, base: Path, cache: str, kernels: Path) -> Environment:
    """Return a process's variables: its cache, its kernels, and that it must not compile what it should find."""
    return {
        "TRITON_CACHE_DIR": str(base / f"{way.name}-{cache}"),
        "NORMFORGE_AOT": str(kernels) if way.ahead else "",
        "NORMFORGE_FROZEN": "1" if way.kept or way.ahead else "0",
    }


def start(way: Way, variables: Environment, device: str = "cuda") -> Sample:
    """Run one process to its first result."""
    now = time.time()
    return Sample(**json.loads(_output(("-m", "benchmarks.first_result", str(now), way.what, device), variables)))


def compile_ahead(folder: Path, arch: str) -> None:
    """Compile what the process launches into a folder."""
    argv = ("-m", "normforge", "aot", "--arch", arch, "--n", str(N), "--out", str(folder), *_MODES)
    _output(argv, {"TRITON_CACHE_DIR": str(folder.with_name("build"))})


def table(rows: Sequence[Row]) -> str:
    """Return the results as a table."""
    headers = ["seconds to the first training step", "process", "of it after torch and the GPU were ready"]
    shown = [(row.title, f"{row.total_s:.2f}", f"{row.norm_s:.2f}") for row in rows]
    return tabulate(shown, headers, tablefmt="github", disable_numparse=True)


def _row(way: Way, samples: Sequence[Sample]) -> Row:
    norm = [sample.norm_s for sample in samples]
    total = median(sample.total_s for sample in samples)
    figures = (round(seconds, 4) for seconds in (total, median(norm), min(norm), max(norm)))
    return Row(way.name, way.title, len(samples), *figures)


def _output(arguments: Sequence[str], variables: Environment) -> str:
    command = (sys.executable, *arguments)
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout
