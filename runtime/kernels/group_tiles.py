"""How a program's tiles lie in x of GroupNorm, and which tile of the table a launch takes: one that fits its groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from ..codegen.groups import GroupMode
from ..codegen.instance import Tile
from ..codegen.tiling import GROUP_PARTS, GROUP_PARTS_BACKWARD, WARP, power_of_two
from ..codegen.values import Pipeline
from .gpu import Target

# Of channels that are innermost, a program reads so many bytes in a row, if groups are not longer: two sectors, which
# memory hands out together.
_LEAST_RUN = 64
# Values of x that a thread holds as fp32; backward there are as many of dy.
_MOST_VALUES = 64
# Channels that a tile has side by side backward, where each is summed by itself: by fewer warps, then, or by one.
_MOST_BESIDE = 8
# What a program that merges parts reads of them.
_MOST_PARTS = 1024


@dataclass(frozen=True)
class Shape:
    """The sizes of x that its tiles depend on.

    Attributes:
        channels: in all.
        groups: of a sample.
        positions: of a channel.
        itemsize: bytes of an element.
    """

    channels: int
    groups: int
    positions: int
    itemsize: int

    @property
    def group_channels(self) -> int:
        """Channels of a group."""
        return self.channels // self.groups

    @property
    def group_length(self) -> int:
        """Elements of a group: the row length of tables."""
        return self.group_channels * self.positions


@dataclass(frozen=True)
class Cut:
    """How a launch cuts x.

    Attributes:
        width: channels of a program, whole groups.
        block_c: channels of a tile.
        block_s: positions of a tile.
        tiles: how many a program's channels have.
        held: how many it has in registers.
        parts: how many programs share the tiles.
        part_tiles: tiles of each.
    """

    width: int
    block_c: int
    block_s: int
    tiles: int
    held: int
    parts: int
    part_tiles: int

    def is_full(self, positions: int) -> bool:
        """Return True if all tiles and positions that a program has in registers at once exist."""
        return positions % self.block_s == 0 and self.tiles % self.held == 0

    def is_alike(self, positions: int) -> bool:
        """Return True if the tiles that a program has in registers are of the same channels."""
        return positions % (self.block_s * self.held) == 0


def cut(mode: GroupMode, shape: Shape, tile: Tile) -> Cut:
    """How a tile of the table cuts x: a function of its shape but for how many samples it has."""
    if mode.channels_last:
        width, block_c, block_s = _channels_innermost(shape, tile.block)
    else:
        beside = gcd(shape.group_channels, _MOST_BESIDE) if mode.is_backward else 1
        width, block_c, block_s = _positions_innermost(shape, tile.block, min(beside, tile.block))
    tiles = -(-width // block_c) * -(-shape.positions // block_s)
    if tile.pipeline is Pipeline.ONE_PASS:
        return Cut(width, block_c, block_s, tiles, tiles, 1, tiles)
    held = min(tile.held, power_of_two(tiles))
    runs, most = -(-tiles // held), max(1, _MOST_PARTS // power_of_two(width // shape.group_channels))
    each = 1 if tile.pipeline is Pipeline.SPREAD else min(max(tile.rows, -(-runs // most)), runs)
    return Cut(width, block_c, block_s, tiles, held, -(-runs // each), held * each)


def _positions_innermost(shape: Shape, block: int, beside: int) -> tuple[int, int, int]:
    channels = shape.group_channels
    block_s = min(block // beside, power_of_two(shape.positions))
    room = block // block_s
    if power_of_two(channels) > room:
        return channels, room, block_s
    # Small groups are taken several at a time.
    width = max(channels * groups for groups in _divisors(shape.groups) if power_of_two(channels * groups) <= room)
    return width, power_of_two(width), block_s


def _channels_innermost(shape: Shape, block: int) -> tuple[int, int, int]:
    channels = shape.group_channels

    def merit(width: int) -> tuple[int, float, int]:
        # Reads that fill sectors, then tiles that are full of channels, then programs that are many.
        return min(width * shape.itemsize, _LEAST_RUN), width / power_of_two(width), -width

    widths = [channels * groups for groups in _divisors(shape.groups)]
    width = max((width for width in widths if power_of_two(width) <= block), key=merit, default=channels)
    block_c = min(power_of_two(width), block)
    return width, block_c, min(block // block_c, power_of_two(shape.positions))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def choose(mode: GroupMode, shape: Shape, tiles: Iterable[Tile], target: Target) -> tuple[Tile, Cut]:
    """The first of some tiles that fits a launch: its groups in registers, or programs that wait on the GPU.

    Where none does, groups go over several programs that do not wait.
    """
    for tile in tiles:
        found = cut(mode, shape, tile)
        if _fits(tile, found, target):
            return tile, found
    tile = GROUP_PARTS_BACKWARD if mode.is_backward else GROUP_PARTS
    return tile, cut(mode, shape, tile)


def _fits(tile: Tile, found: Cut, target: Target) -> bool:
    if tile.pipeline is Pipeline.ONE_PASS:
        return found.tiles * found.block_c * found.block_s <= _MOST_VALUES * WARP * tile.warps
    if tile.pipeline is not Pipeline.SPREAD:
        return True
    # The interpreter runs one program after another.
    held = target.multiprocessors * tile.resident if target.compiles else 1
    return found.parts <= held and (target.is_nvidia or not target.compiles)
