"""Define the cells of the matrix: pairs of a Python and a Triton, each of which runs both suites."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# The oldest that is taken, the one that is pinned, and the newest there is.
TRITONS = ("3.6.0", "3.7.1", "3.9.0")


@dataclass(frozen=True)
class Cell:
    """A release of Python and one of Triton."""

    python: str
    triton: str

    def __str__(self) -> str:
        return f"{self.python}x{self.triton}"


ALL = tuple(Cell(*pair) for pair in product(PYTHONS, TRITONS))
# Each Python and each Triton once at least; the newest of either together, and the oldest.
FEW = (Cell("3.10", "3.6.0"), Cell("3.11", "3.7.1"), Cell("3.12", "3.9.0"), Cell("3.13", "3.9.0"))

# By the name of a suite: the arguments of pytest, and the value of TRITON_INTERPRET.
SUITES: dict[str, tuple[tuple[str, ...], str | None]] = {
    "interpreter": ((), "1"),
    "compile": (("-m", "compile"), None),
}


class CellError(Exception):
    """A cell in which no test could be run."""


@dataclass(frozen=True)
class Seen:
    """The result of one suite in one cell.

    Attributes:
        cell: where.
        suite: which.
        versions: of python, torch, triton and numpy, as they say themselves.
        passed: how many tests.
        failed: how many tests, with those that raised outside of the test itself.
        skipped: how many tests.
        seconds: of the whole run, collection included.
    """

    cell: Cell
    suite: str
    versions: dict[str, str]
    passed: int
    failed: int
    skipped: int
    seconds: float


_VERSIONS = (
    "import json, platform, torch, triton, numpy; print(json.dumps({'python': platform.python_version(), "
    "**{module.__name__: str(module.__version__) for module in (torch, triton, numpy)}}))"
)


def run(cell: Cell, every: int, jobs: int) -> Iterator[Seen]:
    """Make a cell's environment, if it is not there yet, and run every so many tests of each suite in it.

    Raises:
        CellError: the environment cannot be made, or pytest ends without a result.
    """
    made = _checked(
        ["make", "--no-print-directory", "-s", "venv", f"PYTHON=python{cell.python}", f"TRITON={cell.triton}"],
        f"the environment of {cell} cannot be made",
    )
    python = str(ROOT / made.strip().splitlines()[-1] / "python")
    versions = json.loads(_checked([python, "-c", _VERSIONS], f"{cell} cannot import what it holds"))
    for suite, (chosen, interpret) in SUITES.items():
        variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        variables |= {"TRITON_INTERPRET": interpret} if interpret else {}
        with TemporaryDirectory(prefix="normforge-matrix-") as folder:
            report = Path(folder) / "report.xml"
            options = ["-q", "-p", "proving.matrix.every", f"--every={every}", "-n", str(jobs), f"--junitxml={report}"]
            started = time.monotonic()
            ended = subprocess.run([python, "-m", "pytest", *options, *chosen], cwd=ROOT, env=variables, check=False)
            seconds = time.monotonic() - started
            if not report.is_file():
                raise CellError(f"{suite} of {cell}: pytest ended with status {ended.returncode} and no report")
            yield Seen(cell, suite, versions, *counted(report), seconds)


def counted(report: Path) -> tuple[int, int, int]:
    """How many tests passed, failed and were skipped, from pytest's report."""
    totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for name in totals:
            totals[name] += int(suite.get(name, 0))
    failed = totals["failures"] + totals["errors"]
    return totals["tests"] - failed - totals["skipped"], failed, totals["skipped"]


def _checked(command: list[str], what: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    try:
        ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CellError(f"{what}: {error}") from error
    if ended.returncode:
        raise CellError(f"{what}: {(ended.stderr or ended.stdout).strip()[-2000:]}")
    return ended.stdout
