"""`normforge list`: the dispatch table in use."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from tabulate import tabulate

from ..codegen.instance import Tile
from ..selection.dispatch import instances
from ..selection.table import Entry


def main(args: argparse.Namespace) -> int:
    """Run `normforge list`; returns 0."""
    globs, arch = args.globs, args.arch
    entries = instances()
    for glob in globs:
        if not any(fnmatchcase(entry.name, glob) for entry in entries):
            near = difflib.get_close_matches(glob.rstrip("*"), [entry.name for entry in entries], n=3)
            args.parser.error(f"no instance matches {glob!r}; {_hint(near, args.parser.prog)}")
    shown = [entry for entry in entries if not globs or any(fnmatchcase(entry.name, glob) for glob in globs)]
    few, some = entries[0].small_m, entries[0].some_m
    # A column for ragged rows, and for some, where they have tiles of their own.
    between = [f"{few + 1} to {some} rows"] if any(entry.tiles_on(arch).some for entry in shown) else []
    ragged = ["of ragged lengths"] if any(entry.tiles_on(arch).ragged for entry in shown) else []
    most = some if between else few
    headers = ["instance", "N", f"more than {most} rows", *ragged, *between, f"{few} rows or fewer", "batch invariant"]
    rows = [_row(entry, arch, bool(ragged), bool(between)) for entry in shown]
    print(tabulate(rows, headers, disable_numparse=True))
    print(f"\n{len(shown)} of {len(entries)} instances")
    return 0


def _hint(near: Sequence[str], prog: str) -> str:
    return f"the nearest are {', '.join(near)}" if near else f"{prog} without a glob prints every name"


def _row(entry: Entry, arch: str, ragged: bool, between: bool) -> tuple[str, ...]:
    tiles = entry.tiles_on(arch)
    few, some, many = tiles.by_rows
    shown = (many, *([tiles.ragged or many] if ragged else []), *([some] if between else []), few, tiles.for_every_m)
    return entry.name, f"{entry.first}..{entry.last or ''}", *map(shown_tile, shown)


def shown_tile(tile: Tile) -> str:
    """Return a tile in words."""
    return f"{tile.pipeline.value} {tile.rows}×{tile.block} on {tile.warps} warp{'s' * (tile.warps > 1)}"
