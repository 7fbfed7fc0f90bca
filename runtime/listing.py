"""`normforge list`: the dispatch table in use."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from tabulate import tabulate

from .dispatch import instances
from .table import Entry


def main(argv: Sequence[str], prog: str) -> int:
    """Run `normforge list`; always returns 0."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Print the dispatch table in use: normforge's own, or that of the folder in NORMFORGE_INSTANCES.",
    )
    parser.add_argument("globs", nargs="*", metavar="GLOB", help="show only instances whose name matches one of these")
    globs = parser.parse_args(argv).globs
    entries = instances()
    for glob in globs:
        if not any(fnmatchcase(entry.name, glob) for entry in entries):
            near = difflib.get_close_matches(glob, [entry.name for entry in entries], n=3, cutoff=0.0)
            parser.error(f"no instance matches {glob!r}; the nearest are {', '.join(near)}")
    shown = [entry for entry in entries if not globs or any(fnmatchcase(entry.name, glob) for glob in globs)]
    print(tabulate([_row(entry) for entry in shown], ["instance", "kernel", "N", "tile"], disable_numparse=True))
    print(f"\n{len(shown)} of {len(entries)} instances")
    return 0


def _row(entry: Entry) -> tuple[str, str, str, str]:
    rows = "1 row" if entry.rows == 1 else f"{entry.rows} rows"
    tile = f"{rows}, {entry.block} columns a chunk, {entry.warps} warps"
    return entry.name, entry.kernel, f"{entry.first}..{entry.last or ''}", tile
