"""The layout of a program's tiles in GroupNorm's x, and the choice of a table's tile that fits the groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import gcd, inf

from ..codegen.groups import GroupMode
from ..codegen.instance import Tile
from ..codegen.tiling import GROUP_PARTS, GROUP_PARTS_BACKWARD, REGISTERS, WARP, power_of_two
from ..codegen.values import Pipeline
from .gpu import Target

# The contiguous bytes that a program reads where channels are innermost, unless groups are longer: two sectors, which
# memory delivers together. On an H200 128 bytes were no faster, and 256 to 1024 bytes up to 1.8 times as slow.
_LEAST_RUN = 64
# Registers of a thread that hold values of x; the backward pass holds as many of dy.
_HELD_REGISTERS = 64
# Registers of a thread for other values, by whether the kernel computes gradients. With fewer, threads of an H200
# spilled.
_OTHER_REGISTERS = {False: 40, True: 68}
# Channels of a backward tile, each of which is summed separately: more channels leave fewer warps, or one, to each.
_MOST_BESIDE = 8
# The most parts of a group.
_MOST_PARTS = 1024
# The fewest adjacent positions in a tile, unless a channel has fewer: 128 bytes of 16-bit x.
_LEAST_POSITIONS = 64


@dataclass(frozen=True)
class Shape:
    """The sizes of x that tiles depend on.

    Attributes:
        channels: channels in total.
        groups: groups per sample.
        positions: positions per channel.
        itemsize: bytes per element.
    """

    channels: int
    groups: int
    positions: int
    itemsize: int

    @property
    def group_channels(self) -> int:
        """The channels per group."""
        return self.channels // self.groups


@dataclass(frozen=True)
class Cut:
    """The division of x into programs and tiles.

    Attributes:
        width: channels per program: whole groups, or any channels if groups that registers do not hold have channels
            innermost.
        block_c: channels per tile.
        block_s: positions per tile.
        tiles: the number of tiles of a program's channels.
        held: the number of tiles that a program holds in registers.
        parts: the number of programs that share the tiles.
        part_tiles: the number of tiles per part.
    """

    width: int
    block_c: int
    block_s: int
    tiles: int
    held: int
    parts: int
    part_tiles: int

    def is_full(self, positions: int) -> bool:
        """Return True if all tiles and positions that a program holds in registers at once are within x."""
        return positions % self.block_s == 0 and self.tiles % self.held == 0

    def is_alike(self, positions: int) -> bool:
        """Return True if all tiles that a program holds in registers at once have the same channels."""
        return positions % (self.block_s * self.held) == 0


def cut(mode: GroupMode, shape: Shape, tile: Tile) -> Cut:
    """Return the cut of x by a tile of the table, which does not depend on the number of samples."""
    channels = shape.group_channels
    if mode.channels_last:
        whole = _cut(shape, tile, *_channels_innermost(shape, tile.block, channels))
        # Parts sum up channels one by one: a program that sums groups adds up a matrix of groups by channels, where all
        # but one in a column are 0. In bf16 on an H200, 16x320x64x64 took 57 us so, 44 by channels.
        return whole if whole.parts == 1 else _cut(shape, tile, *_channels_innermost(shape, tile.block, 1))
    beside = gcd(channels, _MOST_BESIDE) if mode.is_backward else 1
    most = beside if mode.is_backward else power_of_two(channels)
    return _cut(shape, tile, *_positions_innermost(shape, tile.block, min(beside, tile.block), most))


def _cut(shape: Shape, tile: Tile, width: int, block_c: int, block_s: int) -> Cut:
    tiles = -(-width // block_c) * -(-shape.positions // block_s)
    held = tiles if tile.pipeline is Pipeline.ONE_PASS else min(tile.held, power_of_two(tiles))
    runs = -(-tiles // held)
    each = min(max(tile.rows, -(-runs // _MOST_PARTS)), runs)
    return Cut(width, block_c, block_s, tiles, held, -(-runs // each), held * each)


def _positions_innermost(shape: Shape, block: int, least: int, most: int) -> tuple[int, int, int]:
    """Return the width, channels and positions of tiles of `least` to `most` channels.

    They are the fewest, which leave the fewest lanes idle, and the longest of those.
    """
    channels = shape.group_channels
    longest = min(block // least, power_of_two(shape.positions))
    shortest = min(longest, max(_LEAST_POSITIONS, block // most))
    lengths = (longest >> halvings for halvings in range((longest // shortest).bit_length()))
    block_s = min(lengths, key=lambda length: -(-channels // (block // length)) * -(-shape.positions // length))
    room = block // block_s
    if power_of_two(channels) > room:
        return channels, room, block_s
    # A program takes several small groups at a time.
    width = max(channels * groups for groups in _divisors(shape.groups) if power_of_two(channels * groups) <= room)
    return width, power_of_two(width), block_s


def _channels_innermost(shape: Shape, block: int, together: int) -> tuple[int, int, int]:
    """Return the width, channels and positions of tiles that have so many adjacent channels, or some times as many."""

    def merit(width: int) -> tuple[int, float, int]:
        # Prefer reads that fill sectors, then tiles that are full of channels, then many programs.
        return min(width * shape.itemsize, _LEAST_RUN), width / power_of_two(width), -width

    widths = [together * each for each in _divisors(shape.channels // together)]
    width = max((width for width in widths if power_of_two(width) <= block), key=merit, default=together)
    block_c = min(power_of_two(width), block)
    return width, block_c, min(block // block_c, power_of_two(shape.positions))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


# For norms over channels, by whether the kernel computes gradients: the most channels that a program holds in
# registers; and numbers of channels, with the bytes of adjacent positions that a program reads for up to that number: a
# sector, if there are many.
_MOST_HELD = {False: 2048, True: 1024}
_RUNS = {False: ((256, 128), (1024, 64), (inf, 32)), True: ((256, 64), (inf, 32))}
# Channels per chunk. A tile has the widest chunks that leave few lanes idle.
_CHUNKS = (256, 128, 64, 32, 16)
_IDLE_LANES = 1 / 8
# Values of x that a thread holds in x's dtype; the backward pass holds as many of dy. Of 16 bits, a forward pass with a
# mean holds twice as many: it adds up thrice, and more warps are more steps of each sum. ConvNeXt's and VAEs' maps took
# 0.68 of a copy's speed on an H200, where they took 0.61.
_VALUES = {False: 64, True: 32}
# The most warps, and those of a forward pass that reads channels twice. On one warp a thread added 64 channels of a
# position in turn: on an H200 rstd was off by 16 units in the last place beside a massive value, and sums spilled.
# LayerNorm of 64x2304x7x7 in bf16 took 488 us there, and takes 29; RMSNorm and fp32 take 3 to 60 % less time.
_MOST_WARPS, _SWEEP_WARPS = 16, 8


def channel_tile(mode: GroupMode, channels: int) -> Tile:
    """Return the tile of a norm over channels: `rows` positions, and chunks of `block` channels.

    The tile depends on the channels alone, so that a position's bits depend on neither the batch nor the image's size.
    """
    is_backward = mode.is_backward
    run = next(size for most, size in _RUNS[is_backward] if channels <= most)
    rows = run // mode.dtype_in.itemsize
    fitting = (size for size in _CHUNKS if -(-channels // size) * size <= channels * (1 + _IDLE_LANES))
    block = next(fitting, _CHUNKS[-1])
    held = channels <= _MOST_HELD[is_backward]
    values = rows * (-(-channels // block) * block if held else block)
    each = _VALUES[is_backward] * (2 if mode.span.centres and not is_backward and mode.dtype_in.itemsize == 2 else 1)
    warps = min(power_of_two(-(-values // (WARP * each))), _MOST_WARPS) if held or is_backward else _SWEEP_WARPS
    pipeline = Pipeline.ONE_PASS if held else Pipeline.TWO_PASS
    return Tile(pipeline, rows, block, warps, resident=max(1, _MOST_WARPS // warps) if is_backward else 1)


def choose(mode: GroupMode, shape: Shape, tiles: Iterable[Tile], target: Target) -> tuple[Tile, Cut]:
    """Return the first tile that fits a launch, with the tile's cut.

    A tile of whole groups fits if registers hold the groups, if need be with fewer programs at once. Groups that it
    does not fit are read twice, if the tile says in what runs. If no tile fits, several programs share each group.
    """
    parts = GROUP_PARTS_BACKWARD if mode.is_backward else GROUP_PARTS
    cuts = ((each, cut(mode, shape, each)) for tile in (*tiles, parts) for each in _tried(tile))
    return next(each for each in cuts if _fits(mode, shape, *each, target))


def _tried(tile: Tile) -> Iterator[Tile]:
    yield from (replace(tile, resident=each) for each in range(tile.resident, 0, -1))
    if tile.pipeline is Pipeline.ONE_PASS and tile.held:
        yield replace(tile, pipeline=Pipeline.TWO_PASS, resident=1)


def _fits(mode: GroupMode, shape: Shape, tile: Tile, pieces: Cut, target: Target) -> bool:
    if tile.pipeline is Pipeline.TWO_PASS:
        return True
    # Only PTX keeps 16-bit values as they are until they are used.
    size, threads = shape.itemsize if target.is_nvidia else 4, tile.warps * WARP
    held = pieces.tiles * pieces.block_c * pieces.block_s * size / (4 * threads)
    needed = held * (2 if mode.is_backward else 1) + _OTHER_REGISTERS[mode.is_backward]
    # Registers are allocated by eights.
    fits = held <= _HELD_REGISTERS and (tile.resident == 1 or needed <= REGISTERS // (threads * tile.resident) // 8 * 8)
    return fits and (not tile.held or pieces.is_full(shape.positions))
