"""The command: python -m tests.matrix."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ..evidence import Table, add_option, markdown, record
from .cells import ALL, FEW, ROOT, CellError, Seen, run

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
    add_option(parser)
    arguments = parser.parse_args(argv)
    every = arguments.every or (1 if arguments.full else _EVERY)
    if every < 1 or arguments.jobs < 1:
        parser.error("--every and --jobs take whole numbers from 1")
    usual = ALL if arguments.full or arguments.only else FEW
    cells = [cell for cell in usual if fnmatchcase(str(cell), arguments.only or "*")]
    if not cells:
        parser.error(f"--only {arguments.only!r} matches no cell; they are {', '.join(map(str, ALL))}")
    seen: list[Seen] = []
    broken: list[str] = []
    for cell in cells:
        print(f"{cell}: every {every} of each file's tests", flush=True)
        try:
            for found in run(cell, every, arguments.jobs):
                seen.append(found)
                if arguments.record:
                    record(arguments.record, "versions", table(seen, every, broken), summary, _PAGE)
        except CellError as error:
            broken.append(str(error))
    found_all = table(seen, every, broken)
    if arguments.record:
        record(arguments.record, "versions", found_all, summary, _PAGE)
    print(summary(found_all))
    return 1 if broken or any(found.failed for found in seen) else 0


def table(seen: Sequence[Seen], every: int, broken: Sequence[str]) -> Table:
    """Return the table, a row per suite and environment; what was not run is in the header."""
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    header = {"tests": "all" if every == 1 else f"every {every}th of each file", "revision": revision}
    header |= {f"not run, {number}": " ".join(why.split()) for number, why in enumerate(broken, 1)}
    rows = []
    for found in seen:
        counts = (found.suite, found.passed, found.failed, found.skipped, f"{found.seconds:.0f}")
        values = (*(found.versions[name] for name in _COLUMNS[:4]), *map(str, counts))
        rows.append(dict(zip(_COLUMNS, values, strict=True)))
    return Table(header, _COLUMNS, rows)


def summary(table: Table) -> str:
    """Return the section of the page."""
    about = "; ".join(f"{name}: {value}" for name, value in table.header.items())
    return f"{about}.\n\n{markdown(_COLUMNS, [[row[name] for name in _COLUMNS] for row in table.rows])}"
