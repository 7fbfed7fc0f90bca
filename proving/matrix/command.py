"""The command: python -m proving matrix. Run both suites in cells, each a pair of a Python and a Triton."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from .. import parts
from ..evidence import ROOT, Table, conclude, markdown, parser_of

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
SUITES: dict[str, tuple[tuple[str, ...], str | None]] = {"interpreter": ((), "1"), "compile": (("-m", "compile"), None)}


class CellError(Exception):
    """A cell in which no test could be run."""


# A row of the table: the versions as they say themselves, the suite, the counts of tests, and the seconds of the run.
Row = tuple[str, ...]
# The two suites of a cell, or why it could not be run.
Result = list[Row] | str

_VERSIONS = (
    "import json, platform, torch, triton, numpy; print(json.dumps({'python': platform.python_version(), "
    "**{module.__name__: str(module.__version__) for module in (torch, triton, numpy)}}))"
)


def run(cell: Cell, every: int, jobs: int) -> Iterator[Row]:
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
            found = (*(versions[name] for name in _COLUMNS[:4]), suite, *counted(report), f"{seconds:.0f}")
            yield tuple(map(str, found))


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


# Of each file: all of both suites takes one core more than half an hour in each cell.
_EVERY = 64

_PAGE = Path("docs/reference/versions.md")
_COLUMNS = ("python", "torch", "triton", "numpy", "suite", "passed", "failed", "skipped", "seconds")


def main(argv: list[str]) -> int:
    """Run cells, and return 1 if a test failed, or a cell could not be run."""
    about = "Run both suites on several releases of Python and Triton, each in an environment of its own."
    parser = parser_of("matrix", about)
    parser.add_argument("--full", action="store_true", help=f"all tests in all {len(ALL)} cells")
    parser.add_argument("--every", type=int, metavar="K", help=f"every K-th test of each file (default: {_EVERY})")
    # Processes that run the tests of a cell.
    parts.add_options(parser, jobs=2)
    arguments = parser.parse_args(argv)
    every = arguments.every or (1 if arguments.full else _EVERY)
    if every < 1:
        parser.error("--every takes a whole number from 1")
    usual = ALL if arguments.full or arguments.only != "*" else FEW
    cells = parts.chosen({str(cell): cell for cell in usual}, parser, arguments)
    header = {
        "tests": "all" if every == 1 else f"every {every}th of each file",
        "revision": arguments.revision or _revision(),
    }
    found = parts.run(cells, lambda due: _seen(due, every, arguments.jobs), arguments, header)
    whole = table(found.results.values(), header)
    conclude(arguments, "versions", whole, summary, page=_PAGE, left=found.left)
    failed = any(row["failed"] != "0" for row in whole.rows) or any(isinstance(r, str) for r in found.results.values())
    return 1 if failed or found.left else 0


def _seen(due: Sequence[Cell], every: int, jobs: int) -> Generator[tuple[str, Result], None, None]:
    for cell in due:
        print(f"{cell}: every {every} of each file's tests", flush=True)
        try:
            yield str(cell), [*run(cell, every, jobs)]
        except CellError as error:
            yield str(cell), str(error)


def _revision() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def table(results: Iterable[Result], header: Mapping[str, str]) -> Table:
    """Return the table, a row per suite and environment; what was not run is in the header."""
    results = [*results]
    broken = [result for result in results if isinstance(result, str)]
    header = {**header, **{f"not run, {number}": " ".join(why.split()) for number, why in enumerate(broken, 1)}}
    return Table.of(header, _COLUMNS, [row for result in results if not isinstance(result, str) for row in result])


def summary(table: Table) -> str:
    """Return the section of the page."""
    about = "; ".join(f"{name}: {value}" for name, value in table.header.items())
    return f"{about}.\n\n{markdown(_COLUMNS, [[row[name] for name in _COLUMNS] for row in table.rows])}"
