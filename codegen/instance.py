"""A row of the dispatch table: a mode over one bucket of row lengths, with the tiles of its kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from .groups import AnyMode
from .lazy import cached_property
from .values import Pipeline

# The name under which tiles serve every architecture without tiles of its own.
ANY = "any"


@dataclass(frozen=True)
class Bucket:
    """The row lengths first..last, both included, that one instance serves; last is None for no limit."""

    name: str
    first: int
    last: int | None

    def __contains__(self, n: int) -> bool:
        return self.first <= n and (self.last is None or n <= self.last)

    def __str__(self) -> str:
        return f"{self.first}..{'' if self.last is None else self.last}"


@dataclass(frozen=True)
class Tile:
    """The part of x that one program takes: `rows` rows, in chunks of `block` columns, on `warps` warps of 32 threads.

    In GroupNorm's two_pass, `rows` are consecutive runs of `held` tiles of `block` elements. A one_pass with `held` is
    read so if registers do not hold the group.
    """

    pipeline: Pipeline = field(metadata={"means": "pipeline"})
    rows: int = field(metadata={"means": "rows a program"})
    block: int = field(metadata={"means": "columns a chunk"})
    warps: int = field(metadata={"means": "warps"})
    # Fields that only some pipelines use follow, with a default; `means` is their name in a dispatch table's header.
    resident: int = field(default=1, metadata={"means": "programs a multiprocessor holds"})
    held: int = field(default=0, metadata={"means": "chunks a program keeps"})
    stages: int = field(default=1, metadata={"means": "stages of a loop over rows"})

    @property
    def row(self) -> tuple[str | int, ...]:
        """Return the fields in order, as tables have them, without trailing defaults."""
        values = [(getattr(self, field.name), field.default) for field in fields(Tile)]
        while values[-1][0] == values[-1][1]:
            values.pop()
        return (self.pipeline.value, *(value for value, _ in values[1:]))


@dataclass(frozen=True)
class Tiles:
    """The tiles of an instance: many rows fill a GPU by themselves, few rows want more warps each.

    Attributes:
        large: for many rows.
        small: for few rows.
        invariant: for any number of rows, where the bits of a row must not depend on that number; None means `large`.
        some: for more than a few rows that hardly fill a GPU; None means `large`.
        ragged: for many rows that leave lanes of `large` idle, as `tiling.is_ragged` decides; None means `large`.
    """

    large: Tile
    small: Tile
    invariant: Tile | None = None
    some: Tile | None = None
    ragged: Tile | None = None

    @property
    def for_every_m(self) -> Tile:
        """Return the tile under batch invariance."""
        return self.invariant or self.large

    @property
    def by_rows(self) -> tuple[Tile, Tile, Tile]:
        """Return the tiles for few, some and many rows."""
        return self.small, self.some or self.large, self.large

    @property
    def every(self) -> tuple[Tile, ...]:
        """Return all tiles without duplicates."""
        return tuple(dict.fromkeys((*self.by_rows, self.for_every_m, self.ragged or self.large)))

    @property
    def row(self) -> tuple[tuple[str | int, ...], ...]:
        """Return the tiles as dispatch tables have them, without those at the end that equal the first."""
        tiles = [self.large, self.small, self.for_every_m, self.some or self.large, self.ragged or self.large]
        while len(tiles) > 2 and tiles[-1] == self.large:
            tiles.pop()
        return tuple(tile.row for tile in tiles)


@dataclass(frozen=True)
class Instance:
    """One row of the dispatch table: a mode over a bucket of row lengths, with tiles by architecture, ANY first."""

    mode: AnyMode
    bucket: Bucket
    tiles: tuple[tuple[str, Tiles], ...]

    @cached_property
    def name(self) -> str:
        """Return the instance's name: table entry, pytest id, and the text that --filter matches."""
        return f"{self.mode.name}_{self.bucket.name}"

    @property
    def tile(self) -> Tile:
        """Return the tile for many rows on an architecture without tiles of its own."""
        return self.tiles[0][1].large

    @property
    def pipelines(self) -> frozenset[Pipeline]:
        """Return the pipelines that serve this instance on any architecture."""
        return frozenset(tile.pipeline for _, tiles in self.tiles for tile in tiles.every)

    @property
    def summary(self) -> str:
        """Return one line of prose: what the instance computes, for which N, and how."""
        # Imported here because the runtime has every instance and never asks for a summary.
        from . import prose

        return f"{prose.summary(self.mode)}; N = {self.bucket}; {self.tile.pipeline.summary}"
