"""A table that has tiles of its own for some rows."""

from __future__ import annotations

from dataclasses import replace

from normforge.codegen.instance import Tiles
from normforge.selection.table import Table


def with_some(tiles: Tiles) -> Tiles:
    """The same, with twice the warps for some rows that there are for many."""
    return replace(tiles, some=replace(tiles.large, warps=2 * tiles.large.warps))


class SomeTable(Table):
    """Another table, with such tiles."""

    def __init__(self, table: Table) -> None:
        tiles = (tuple((arch, with_some(tiles)) for arch, tiles in entry.tiles) for entry in table)
        super().__init__(table.where, map(lambda entry, tiles: replace(entry, tiles=tiles), table, tiles))
