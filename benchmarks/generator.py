"""Times the generator: manifests/full.yaml counted, listed, built, built again and filtered, and the default manifest.

Runs are one process each: CPU time is what they take where a core is idle, and held to the goals on whatever machine.

python -m benchmarks.generator [RUNS]
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

from tabulate import tabulate

from .chosen import RESULTS
from .environment import ROOT, revision_of
from .progress import progress_over
from .results import save_rows

SUITE = "generator"
MOST_MIB = 1024
_FULL = ("--manifest", "manifests/full.yaml")
_FILTER = ("--filter", "ln_fwd_bf16_n*")
# In a process of its own: a child's memory counts from its parent's.
_MEASURED = """\
import json, resource, subprocess, sys, time
start = time.perf_counter()
subprocess.run([sys.executable, *sys.argv[1:]], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
"""


@dataclass(frozen=True)
class Case:
    """A run of generate.py: a word for it, the most seconds that it may take, and its arguments.

    A first run into a folder finds it empty, and the next one finds what the first one wrote.
    """

    name: str
    goal_s: float
    arguments: tuple[str, ...]
    out: str = ""


CASES = (
    Case("count", 5, (*_FULL, "--count")),
    Case("list", 8, (*_FULL, "--list")),
    Case("full build", 60, _FULL, "full"),
    Case("nothing to change", 15, _FULL, "full"),
    Case("filtered build", 1, (*_FULL, *_FILTER), "filtered"),
    Case("default manifest", 1, ("--manifest", "instances.yaml"), "default"),
)


@dataclass(frozen=True)
class Row:
    """A case, and the medians of its runs: seconds on the clock and of all cores, and the most memory."""

    case: str
    goal_s: float
    runs: int
    wall_s: float
    cpu_s: float
    peak_mib: int


def measure(case: Case, base: Path) -> tuple[float, float, float]:
    """Run one process: seconds on the clock, seconds of CPU time, and MiB at most."""
    out = ("--out", str(base / case.out)) if case.out else ()
    command = (sys.executable, "-c", _MEASURED, "generate.py", *case.arguments, *out)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    elapsed, cpu, peak = json.loads(done.stdout)
    return elapsed, cpu, peak


def header() -> dict[str, str]:
    """Return the machine and the versions that the figures were measured with."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "device": f"{models[0].partition(': ')[2] if models else platform.machine()}, {os.cpu_count()} cores",
        "load": f"{os.getloadavg()[0]:.1f} processes beside",
        "python": platform.python_version(),
        "jinja2": version("jinja2"),
        "pyyaml": version("pyyaml"),
        "normforge": version("normforge"),
        "revision": revision_of(ROOT),
    }


def table(rows: Sequence[Row]) -> str:
    """Return the results as a table."""
    headers = ["generate.py", "goal, s", "CPU time, s", "on the clock, s", "MiB at most"]
    shown = [(row.case, f"{row.goal_s:g}", f"{row.cpu_s:.1f}", f"{row.wall_s:.1f}", row.peak_mib) for row in rows]
    return tabulate(shown, headers, tablefmt="github", disable_numparse=True)


def main(runs: int) -> None:
    """Measure every case, print the table and write it to benchmarks/results/generator."""
    stated = header()
    found: dict[Case, list[tuple[float, float, float]]] = {case: [] for case in CASES}
    for turn in range(runs):
        with tempfile.TemporaryDirectory() as base:
            for case in progress_over(CASES, what=f"run {turn + 1} of {runs}", unit="case"):
                found[case].append(measure(case, Path(base)))
    rows = []
    for case, samples in found.items():
        wall, cpu, peak = (median(values) for values in zip(*samples, strict=True))
        rows.append(Row(case.name, case.goal_s, runs, round(wall, 2), round(cpu, 2), round(peak)))
    save_rows(RESULTS / SUITE, SUITE, stated, Row, rows)
    print(table(rows))
    over = [row.case for row in rows if row.cpu_s > row.goal_s or row.peak_mib > MOST_MIB]
    print(f"over the goal: {', '.join(over)}" if over else f"all within their goals, and {MOST_MIB} MiB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 3)
