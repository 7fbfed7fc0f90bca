"""What a row of the dispatch table is: a mode over one bucket of row lengths, with the tiles that its kernels take."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from .groups import AnyMode
from .lazy import cached_property
from .values import Pipeline

# The architecture whose tiles serve every other that has none of its own.
ANY = "any"


@dataclass(frozen=True)
class Bucket:
    """The row lengths first..last (both included) that one instance serves; last None has no cap."""

    name: str
    first: int
    last: int | None

    def __contains__(self, n: int) -> bool:
        return self.first <= n and (self.last is None or n <= self.last)

    def __str__(self) -> str:
        return f"{self.first}..{'' if self.last is None else self.last}"


@dataclass(frozen=True)
class Tile:
    """How much one program takes: `rows` rows, in chunks of `block` columns, on `warps` warps of 32 threads.

    Of GroupNorm's two_pass, `rows` are runs of `held` tiles of `block` elements, one after another.
    """

    pipeline: Pipeline = field(metadata={"means": "pipeline"})
    rows: int = field(metadata={"means": "rows a program"})
    block: int = field(metadata={"means": "columns a chunk"})
    warps: int = field(metadata={"means": "warps"})
    # What not every pipeline has follows, with a default; `means` is what a dispatch table's head calls it.
    resident: int = field(default=1, metadata={"means": "programs a multiprocessor holds"})
    held: int = field(default=0, metadata={"means": "chunks a program keeps"})
    stages: int = field(default=1, metadata={"means": "stages of a loop over rows"})

    @property
    def row(self) -> tuple[str | int, ...]:
        """The fields in order, as tables have them, without those at the end that have their default."""
        values = [(getattr(self, field.name), field.default) for field in fields(Tile)]
        while values[-1][0] == values[-1][1]:
            values.pop()
        return (self.pipeline.value, *(value for value, _ in values[1:]))


@dataclass(frozen=True)
class Tiles:
    """The tiles of an instance: many rows fill a GPU by themselves, a few want more warps each.

    Attributes:
        large: for many rows.
        small: for a few.
        invariant: for every M, where the bits of a row may not depend on it; None takes the one for many.
        some: for more than a few rows that hardly fill a GPU; None takes the one for many.
        ragged: for many rows that leave lanes of the one for many idle, as `filling.is_ragged` has it; None takes that.
    """

    large: Tile
    small: Tile
    invariant: Tile | None = None
    some: Tile | None = None
    ragged: Tile | None = None

    @property
    def for_every_m(self) -> Tile:
        """The tile under batch invariance."""
        return self.invariant or self.large

    @property
    def by_rows(self) -> tuple[Tile, Tile, Tile]:
        """The tiles for a few rows, for some and for many."""
        return self.small, self.some or self.large, self.large

    @property
    def every(self) -> tuple[Tile, ...]:
        """Each tile once."""
        return tuple(dict.fromkeys((*self.by_rows, self.for_every_m, self.ragged or self.large)))

    @property
    def row(self) -> tuple[tuple[str | int, ...], ...]:
        """The tiles as dispatch tables have them; of the last three, any at the end that are the first are left out."""
        tiles = [self.large, self.small, self.for_every_m, self.some or self.large, self.ragged or self.large]
        while len(tiles) > 2 and tiles[-1] == self.large:
            tiles.pop()
        return tuple(tile.row for tile in tiles)


@dataclass(frozen=True)
class Instance:
    """One row of the dispatch table: a mode over a bucket of row lengths, with its tiles by architecture, ANY first."""

    mode: AnyMode
    bucket: Bucket
    tiles: tuple[tuple[str, Tiles], ...]

    @cached_property
    def name(self) -> str:
        """The instance's name: table entry, pytest id, and what --filter matches."""
        return f"{self.mode.name}_{self.bucket.name}"

    @property
    def tile(self) -> Tile:
        """The tile for many rows, on an architecture without tiles of its own."""
        return self.tiles[0][1].large

    @property
    def pipelines(self) -> frozenset[Pipeline]:
        """Every pipeline that serves this instance, on whichever architecture."""
        return frozenset(tile.pipeline for _, tiles in self.tiles for tile in tiles.every)

    @property
    def summary(self) -> str:
        """One line of prose: what it does, for which N, and how."""
        # The runtime asks for none, and has every instance.
        from . import prose

        return f"{prose.summary(self.mode)}; N = {self.bucket}; {self.tile.pipeline.summary}"
