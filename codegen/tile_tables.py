"""Read and write tables of measured tiles, one YAML file per architecture, and choose an instance's tiles from them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from yaml.nodes import Node

from .document import DocumentKind, Section, compose
from .errors import TileTableError
from .groups import AnyMode, GroupMode
from .instance import ANY, Bucket, Tile, Tiles
from .ladder import read_range
from .tile_limits import holds_stages, may_cut, splits_groups, why_not
from .tiling import EVERY_CLASS, TileClass, class_of, generic_tiles
from .values import Pipeline
from .words import unknown

FOLDER = Path(__file__).resolve().parent / "tiles"

_DOCUMENT = DocumentKind(
    "table of tiles",
    "a table of tiles is classes of first..last: {large: tile, small: tile, and invariant, some, ragged: tile or none}",
    "measure one with normforge tune --out FILE",
    TileTableError,
)
# The form of `architecture` in runtime/kernels/gpu.py.
_ARCHITECTURE = re.compile(r"sm_[0-9]{2,3}|gfx[0-9a-f]{3,4}")
# Words of a table contain no #.
_COMMENT = re.compile(r"(?:^|\s)#")
_CLASS_OF = {kind.name: kind for kind in EVERY_CLASS}
_PIPELINES = tuple(pipeline.value for pipeline in Pipeline)
_SIZES = tuple(field.name for field in fields(Tiles))
# The sizes of M that every row of a table must have.
REQUIRED_SIZES = frozenset(field.name for field in fields(Tiles) if field.default is MISSING)
_FIELDS = {field.name: field for field in fields(Tile)}
_WHOLE = "a whole number"


@dataclass(frozen=True)
class TileTable:
    """The tiles measured on one architecture: by class, ascending ranges of row lengths with their tiles."""

    rows: Mapping[TileClass, tuple[tuple[Bucket, Tiles], ...]]

    def find(self, kind: TileClass, bucket: Bucket) -> Tiles | None:
        """Return the tiles of the range that holds a bucket's longest row, or None; a norm's own class comes first."""
        for measured, tiles in chain.from_iterable(self.rows.get(alike, ()) for alike in kind.alike):
            if serves(measured, bucket):
                return tiles
        return None


def tiles_of(
    mode: AnyMode, bucket: Bucket, tables: Mapping[str, TileTable] | None = None
) -> tuple[tuple[str, Tiles], ...]:
    """Return the tiles for every N of an instance's bucket, by architecture: the generic tiles first, under ANY.

    Args:
        mode: the instance's mode, which determines its class.
        bucket: the row lengths that the instance serves.
        tables: measured tiles by architecture; None means the generator's own tables.
    """
    kind = class_of(mode)
    generic = generic_tiles(kind, bucket)
    known = own_tables() if tables is None else tables
    if _sums_a_gate(mode):
        # The measured modes have no gate per sample, for which a thread holds a third row and a third sum: with tiles
        # of their own length these modes spill 112 to 248 bytes.
        if bucket.last is not None:
            generic = generic_tiles(kind, replace(bucket, last=bucket.last * 3 // 2))
        return ((ANY, generic), *((arch, generic) for arch in known))
    return (
        (ANY, generic),
        *(
            (arch, _fitting(mode, bucket, arch, table.find(kind, bucket) or generic, generic))
            for arch, table in known.items()
        ),
    )


def tiled_alike(mode: AnyMode) -> Hashable:
    """Return a key of everything in a mode that its tiles depend on: modes with equal keys have equal tiles."""
    return class_of(mode), mode.pipelines, _sums_a_gate(mode)


def _sums_a_gate(mode: AnyMode) -> bool:
    return not isinstance(mode, GroupMode) and mode.is_backward and mode.x_gate


def invariant_tile(measured: Tiles, generic: Tiles) -> Tile:
    """Return the tile for any number of rows: as measured, or the generic tile if the measured one spreads rows."""
    tile = measured.for_every_m
    return tile if tile.pipeline.takes_rows_alike else generic.large


def lean(tiles: Tiles) -> Tiles:
    """Return the tiles without those that equal the tile for many rows."""
    own = {size: tile for size, tile in tiles_by_size(tiles).items() if size in REQUIRED_SIZES or tile != tiles.large}
    return Tiles(**own)


def _fitting(mode: AnyMode, bucket: Bucket, arch: str, measured: Tiles, generic: Tiles) -> Tiles:
    """Return the measured tiles, with the generic tile where the mode has no kernel for a tile.

    Modes with dropout do not spread rows. A tile of another class is also replaced if it splits rows that this mode may
    not split, or groups of scales, or if the mode has too many bytes in flight.
    """
    kind = class_of(mode)
    may_be_cut = may_cut(kind)

    def fitting(own: Tile, rule: Tile) -> Tile:
        cuts = own.pipeline is Pipeline.ROWS and own.block < (bucket.last or 0)
        runs = own.pipeline in mode.pipelines and holds_stages(kind, bucket, own, arch)
        fits = runs and (may_be_cut or not cuts) and not splits_groups(kind, bucket, own)
        return own if fits else rule

    few, some, many = map(fitting, measured.by_rows, generic.by_rows)
    invariant = fitting(invariant_tile(measured, generic), generic.large)
    ragged = fitting(measured.ragged, many) if measured.ragged and may_be_cut else None
    return lean(Tiles(many, few, invariant, some, ragged))


@cache
def own_tables() -> Mapping[str, TileTable]:
    """Return every table that comes with the generator, by architecture."""
    return {path.stem: read_table(path, own=True) for path in sorted(FOLDER.glob("*.yaml"))}


def is_architecture(name: str) -> bool:
    """Return True if a name is an architecture's: sm_90 or gfx942, for example."""
    return _ARCHITECTURE.fullmatch(name) is not None


def read_table(path: Path, *, own: bool = False) -> TileTable:
    """Read a table; the file's name is the architecture's.

    Args:
        path: the file, named after the architecture.
        own: whether the table comes with the generator.

    Raises:
        TileTableError: the file cannot be used; the message names file, line, class and the fix.
    """
    if not is_architecture(path.stem):
        raise TileTableError(
            f"{path}: {path.stem!r} is no architecture; name the file after one, sm_90.yaml or gfx942.yaml, say"
        )
    root = compose(path, _DOCUMENT, own=own)
    top = Section(path, kind=_DOCUMENT)
    if root is None:
        raise TileTableError(f"{path}:1: the table is empty; {_DOCUMENT.where}, or remove it")
    rows = {}
    for name, pair in top.mapping(root, f"classes, any of {', '.join(_CLASS_OF)}").items():
        if name not in _CLASS_OF:
            raise top.error(pair.key, unknown("class", name, tuple(_CLASS_OF)))
        kind = _CLASS_OF[name]
        rows[kind] = _read_class(Section(path, name, _DOCUMENT), kind, path.stem, pair.value)
    return TileTable(rows)


def _read_class(section: Section, kind: TileClass, arch: str, node: Node) -> tuple[tuple[Bucket, Tiles], ...]:
    rows = []
    for text, pair in section.mapping(node, "ranges of row lengths, as first..last: tiles").items():
        bucket = read_range(section, text, pair.key, text)
        sizes = section.mapping(pair.value, "large: tile and small: tile")
        for size, tile in sizes.items():
            if size not in _SIZES:
                raise section.error(tile.key, unknown("size of M", size, _SIZES))
        for size in (size for size in _SIZES if size in REQUIRED_SIZES):
            if size not in sizes:
                raise section.error(pair.key, f"{text} has no tile for {size} M; add {size}: {{pipeline: ...}}")
        tiles = {size: _read_tile(section, kind, arch, bucket, tile.value) for size, tile in sizes.items()}
        if "invariant" in tiles and not tiles["invariant"].pipeline.takes_rows_alike:
            raise section.error(
                sizes["invariant"].value,
                f"the tile for every M has pipeline {tiles['invariant'].pipeline.value}, with which a row's bits "
                "depend on where it stands in a batch; take two_pass, or leave invariant out",
            )
        rows.append((pair.key, bucket, Tiles(**tiles)))
    for (_, before, _), (at, bucket, _) in pairwise(rows):
        if before.last is None or bucket.first <= before.last:
            raise section.error(at, f"{bucket} overlaps {before} or is out of order; ranges ascend")
    return tuple((bucket, tiles) for _, bucket, tiles in rows)


def _read_tile(section: Section, kind: TileClass, arch: str, bucket: Bucket, node: Node) -> Tile:
    pairs = section.mapping(node, f"a tile, {{{', '.join(_FIELDS)}}}")
    # A Pipeline for `pipeline`, numbers for the other names.
    values: dict[str, Any] = {}
    for name, pair in pairs.items():
        if name not in _FIELDS:
            raise section.error(pair.key, unknown("field", name, tuple(_FIELDS)))
        if name == "pipeline":
            values[name] = Pipeline(section.word(pair.value, name, _PIPELINES))
        else:
            values[name] = section.integer(pair.value, name, _WHOLE)
    for name, field in _FIELDS.items():
        if name not in values and field.default is MISSING:
            raise section.error(node, f"the tile has no {name}; a tile is {{{', '.join(_FIELDS)}}}")
    tile = Tile(**values)
    problem = why_not(kind, bucket, tile, arch)
    if problem is not None:
        raise section.error(node, problem)
    return tile


def merge(old: TileTable, new: TileTable) -> TileTable:
    """Return the new table's ranges and those ranges of the old table that no new range overlaps."""
    rows = dict(old.rows)
    for kind, measured in new.rows.items():
        kept = [row for row in old.rows.get(kind, ()) if not any(overlap(row[0], bucket) for bucket, _ in measured)]
        rows[kind] = tuple(sorted((*kept, *measured), key=lambda row: row[0].first))
    return TileTable(rows)


def serves(measured: Bucket, bucket: Bucket) -> bool:
    """Return True if a range of a table has the tiles of a bucket: it must hold the bucket's longest row."""
    return measured.last is None if bucket.last is None else bucket.last in measured


def overlap(one: Bucket, other: Bucket) -> bool:
    """Return True if two ranges have a row length in common."""
    return one.first in other or other.first in one


def read_head(path: Path) -> str:
    """Return the comments at the start of a table's file, as they are written.

    Raises:
        TileTableError: there are comments further down, which rewriting the table would lose.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((at for at, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), len(lines))
    lost = next((at for at, line in enumerate(lines[end:], end + 1) if _COMMENT.search(line)), None)
    if lost is not None:
        raise TileTableError(
            f"{path}:{lost}: a comment within the table would be lost when the table is written anew; "
            "move it up, above the first class"
        )
    return "\n".join(lines[:end]).rstrip()


def write_table(table: TileTable, head: str) -> str:
    """Return the text of a table's file.

    Args:
        table: the measured tiles.
        head: comments that say how the tiles were measured, each with its #.
    """
    lines = [head]
    for kind in EVERY_CLASS:
        if kind in table.rows:
            lines += ["", f"{kind.name}:"]
            for bucket, tiles in table.rows[kind]:
                lines += [f"  {bucket}:"]
                lines += [f"    {size}: {_flow(tile)}" for size, tile in tiles_by_size(tiles).items()]
    return "\n".join((*lines, ""))


def tile_words(tile: Tile) -> dict[str, str | int]:
    """Return a tile's fields by name, as tables have them, without trailing defaults."""
    return dict(zip(_FIELDS, tile.row, strict=False))


def tiles_by_size(tiles: Tiles) -> dict[str, Tile]:
    """Return the tiles of a range by size of M, as tables have them, without absent ones."""
    by_size = {size: getattr(tiles, size) for size in _SIZES}
    return {size: tile for size, tile in by_size.items() if tile is not None}


def _flow(tile: Tile) -> str:
    return f"{{{', '.join(f'{name}: {value}' for name, value in tile_words(tile).items())}}}"
