"""The command: python -m tests.matrix."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from .cells import ALL, FEW, ROOT, CellError, Seen, run

# Of each file: all of both suites takes one core more than half an hour in each cell.
_EVERY = 64

_HEAD = """# Versions

Read this to know which releases of Python and Triton the tests were run on, without a GPU: in Triton's CPU interpreter,
and compiled for sm_80, sm_90, sm_100 and gfx942. `make matrix` runs every {every}th test of each file in four pairs of
releases, `make matrix MATRIX=full` all tests in all pairs; either writes this page.
"""


def main(argv: list[str]) -> int:
    """Run cells, and return 1 if a test failed, or a cell could not be run."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix",
        description="Run both suites on several releases of Python and Triton, each in an environment of its own.",
    )
    parser.add_argument("--full", action="store_true", help=f"all tests in all {len(ALL)} cells")
    parser.add_argument("--every", type=int, metavar="K", help=f"every K-th test of each file (default: {_EVERY})")
    parser.add_argument("--only", metavar="GLOB", help="cells of all that match, '3.13x*' say")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests (default: %(default)s)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table of what was seen")
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
                if arguments.markdown:
                    arguments.markdown.write_text(markdown(seen, every, broken))
        except CellError as error:
            broken.append(str(error))
    text = markdown(seen, every, broken)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    print(text)
    return 1 if broken or any(found.failed for found in seen) else 0


def markdown(seen: Sequence[Seen], every: int, broken: Sequence[str]) -> str:
    """The page."""
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    what = "All tests" if every == 1 else f"Every {every}th test of each file"
    lines = [
        _HEAD.format(every=_EVERY),
        f"{what}, revision {revision}:",
        "",
        "| Python | torch | Triton | numpy | suite | passed | failed | skipped | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for found in seen:
        versions = " | ".join(found.versions[name] for name in ("python", "torch", "triton", "numpy"))
        counts = f"{found.passed} | {found.failed} | {found.skipped} | {found.seconds:.0f}"
        lines.append(f"| {versions} | {found.suite} | {counts} |")
    if broken:
        lines += ["", "Not run:", "", *(f"- {' '.join(why.split())}" for why in broken)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
