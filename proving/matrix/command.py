"""The command: python -m proving matrix."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Generator, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from .. import parts
from ..evidence import Table, add_options, conclude, markdown
from .cells import ALL, FEW, ROOT, Cell, CellError, Seen, run

# The two suites of a cell, or why it could not be run.
Result = list[Seen] | str

# Of each file: all of both suites takes one core more than half an hour in each cell.
_EVERY = 64

_PAGE = Path("docs/reference/versions.md")
_COLUMNS = ("python", "torch", "triton", "numpy", "suite", "passed", "failed", "skipped", "seconds")


def main(argv: list[str]) -> int:
    """Run cells, and return 1 if a test failed, or a cell could not be run."""
    parser = argparse.ArgumentParser(
        prog="python -m proving matrix",
        description="Run both suites on several releases of Python and Triton, each in an environment of its own.",
    )
    parser.add_argument("--full", action="store_true", help=f"all tests in all {len(ALL)} cells")
    parser.add_argument("--every", type=int, metavar="K", help=f"every K-th test of each file (default: {_EVERY})")
    parser.add_argument("--only", metavar="GLOB", help="cells of all that match, '3.13x*' say")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests (default: %(default)s)")
    add_options(parser)
    parts.add_options(parser)
    arguments = parser.parse_args(argv)
    every = arguments.every or (1 if arguments.full else _EVERY)
    if every < 1 or arguments.jobs < 1:
        parser.error("--every and --jobs take whole numbers from 1")
    usual = ALL if arguments.full or arguments.only else FEW
    cells = [cell for cell in usual if fnmatchcase(str(cell), arguments.only or "*")]
    if not cells:
        parser.error(f"--only {arguments.only!r} matches no cell; they are {', '.join(map(str, ALL))}")
    header = {
        "tests": "all" if every == 1 else f"every {every}th of each file",
        "revision": arguments.revision or _revision(),
    }
    found = parts.run(
        {str(cell): cell for cell in cells}, lambda due: _seen(due, every, arguments.jobs), arguments, header
    )
    whole = table(found.results.values(), header)
    conclude(arguments, "versions", whole, summary, page=_PAGE, left=found.left)
    failed = any(isinstance(result, str) or any(each.failed for each in result) for result in found.results.values())
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
    rows = []
    for found in (seen for result in results if not isinstance(result, str) for seen in result):
        counts = (found.suite, found.passed, found.failed, found.skipped, f"{found.seconds:.0f}")
        values = (*(found.versions[name] for name in _COLUMNS[:4]), *map(str, counts))
        rows.append(dict(zip(_COLUMNS, values, strict=True)))
    return Table(header, _COLUMNS, rows)


def summary(table: Table) -> str:
    """Return the section of the page."""
    about = "; ".join(f"{name}: {value}" for name, value in table.header.items())
    return f"{about}.\n\n{markdown(_COLUMNS, [[row[name] for name in _COLUMNS] for row in table.rows])}"
