"""The standard ladder of row lengths, the rule for tiles where nothing was measured, and what fits a row or a GPU."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product

from .groups import AnyMode, GroupMode
from .instance import Bucket, Tile, Tiles
from .model import Mode
from .values import Direction, Pipeline

# The last length of each bucket: hidden sizes that models use, so that a row fills its chunks.
STANDARD_LENGTHS = (
    *(128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384),
    *(32768, 65536, 131072, None),
)

# Up to so many rows an instance takes its tile for a few, which is chosen at 64. The one for many is chosen at 512 of
# the longest rows, 262144: those 512 take 159 us of an H200 with it, and 163 with the tile for a few.
SMALL_M = 256
# From there up to so many it takes the one for some, if it has one, which is chosen at 512. They are a wave of programs
# or less, which with the one for many took up to 15 % longer than peers.
SOME_M = 2048

WARP = 32
MOST_WARPS = 32
MOST_RESIDENT_WARPS = 64
LOAD_BYTES = 16


class Load(Enum):
    """What a kernel has to move and hold, as far as its tile depends on it; the value stands in names of classes.

    PLAIN is x and y alone, ADD more than that; backward, ADD is the gradient of a stored sum besides dy and x. QUANT is
    y with a scale a row, SCALED with one a group or a given one, for which no row is held or read once more, and
    ADD_SCALED that with an add, whose tile took 16384x7168 of RMSNorm without one 127 us on an H200 (a2da303); with
    its own 18724 rows take 111 (312f89b). GATE is a gate of x's shape, whose activation takes registers and time. DROP
    is ADD with a dropout, whose mask takes time wherever x is read. MODULATE is ADD with a scale and a shift of each
    row's own. FP8 is an x of 8 bits and a scale, alone, of which 16 bits are made. Where a table has no tiles for
    either SCALED, DROP, MODULATE, FP8 or, backward, ADD, they take those of `TileClass.alike`.
    """

    PLAIN = ""
    ADD = "_add"
    QUANT = "_quant"
    SCALED = "_scaled"
    ADD_SCALED = "_add_scaled"
    GATE = "_gate"
    DROP = "_drop"
    MODULATE = "_mod"
    FP8 = "_fp8"


@dataclass(frozen=True)
class TileClass:
    """Modes that share their tiles: of one direction, one size of x's elements in bytes, one load, one norm or both.

    Attributes:
        direction: which kernels.
        itemsize: bytes of an element of x.
        load: what moves besides.
        rms: whether the norms that keep the mean, RMSNorm say, alone. Where a table has no tiles for these alone, they
            take those that they share with LayerNorm, whose kernels the tiles were measured with.
        layout: of GroupNorm, where positions or channels are innermost; "" of norms of rows.
    """

    direction: Direction
    itemsize: int
    load: Load = Load.PLAIN
    rms: bool = False
    layout: str = ""

    @property
    def name(self) -> str:
        """The word for this class in tables of tiles and on the command line."""
        rms = "_rms" if self.rms else ""
        return f"{self.layout}{self.direction.value}_{8 * self.itemsize}bit{self.load.value}{rms}"

    @property
    def is_grouped(self) -> bool:
        """Whether rows are groups of channels."""
        return bool(self.layout)

    @property
    def shared(self) -> TileClass:
        """The class of both norms."""
        return replace(self, rms=False)

    @property
    def alike(self) -> tuple[TileClass, ...]:
        """The classes whose tiles serve it, its own first."""
        own = (self, self.shared)
        if self.load in (Load.SCALED, Load.ADD_SCALED):
            # What holds a row for its scale serves one that needs it for nothing.
            return (*own, *replace(self, load=Load.QUANT).alike)
        if self.load is Load.MODULATE:
            # Backward, others' tiles spread rows, which these do not.
            return own if self.direction is Direction.BACKWARD else (*own, *replace(self, load=Load.ADD).alike)
        if self.load is Load.FP8:
            return (*own, *replace(self, load=Load.ADD).alike)
        if self.load is Load.ADD and self.direction is Direction.BACKWARD:
            # A gradient more to read. Of fp32 rows no table has any: on sm_90 threads spill up to 48 bytes with PLAIN's
            # tiles, and up to 240 with the rule's.
            return (*own, *replace(self, load=Load.PLAIN).alike)
        if self.load is not Load.DROP:
            return own
        # Forward a mask is drawn whenever x is read, and tiles of QUANT read it once: with ADD's, which read long rows
        # twice, 32768x4096 took an H200 433 us where the add alone took 253 (e2343cb). Backward it is read once.
        load = Load.QUANT if self.direction is Direction.FORWARD else Load.ADD
        return (*own, *replace(self, load=load).alike)


_LEAST_ITEMSIZE = 2

# What the names of GroupNorm's classes begin with, of positions innermost and of channels.
GROUP_LAYOUTS = ("group_", "group_last_")

_BACKWARD_LOADS = (Load.PLAIN, Load.ADD, Load.GATE, Load.DROP, Load.MODULATE)
CLASSES = tuple(
    TileClass(direction, itemsize, load, rms)
    for direction, loads in ((Direction.FORWARD, tuple(Load)), (Direction.BACKWARD, _BACKWARD_LOADS))
    for itemsize, load, rms in product((_LEAST_ITEMSIZE, 4), loads, (False, True))
    if load is not Load.FP8 or itemsize == _LEAST_ITEMSIZE
)
GROUP_CLASSES = tuple(
    TileClass(direction, itemsize, layout=layout)
    for direction, itemsize, layout in product(Direction, (_LEAST_ITEMSIZE, 4), GROUP_LAYOUTS)
)
EVERY_CLASS = (*CLASSES, *GROUP_CLASSES)


def class_of(mode: AnyMode) -> TileClass:
    """The class of a mode; where a row's scale is made, a fused add makes no further difference.

    Rows of fp8 are cut as those of 16 bits, which is what becomes of them: a thread that stores 16 bytes of y at once
    loads 8 of x. They are not of those that stream, whose tables have pipelines that take x as it is.
    """
    if isinstance(mode, GroupMode):
        return TileClass(mode.direction, mode.dtype_in.itemsize, layout=GROUP_LAYOUTS[mode.channels_last])
    load = Load.PLAIN
    if mode.scales_locally:
        load = Load.ADD_SCALED if mode.fadd.adds else Load.SCALED
    elif mode.fquant.quantises:
        load = Load.QUANT
    elif mode.gating.gates:
        load = Load.GATE
    elif mode.dropout:
        load = Load.DROP
    elif mode.modulated:
        load = Load.MODULATE
    elif mode.dtype_in.is_fp8 and not mode.fadd.adds:
        load = Load.FP8
    elif mode.fadd.stores if mode.is_backward else not mode.streams:
        load = Load.ADD
    return TileClass(mode.direction, max(mode.dtype_in.itemsize, _LEAST_ITEMSIZE), load, not mode.norm.centres)


def standard_ladder() -> tuple[Bucket, ...]:
    """The buckets a manifest gets when it names none of its own."""
    return ladder_of(STANDARD_LENGTHS)


def ladder_of(lengths: tuple[int | None, ...]) -> tuple[Bucket, ...]:
    """Adjoining buckets from ascending last lengths; None is the bucket without a cap."""
    buckets = []
    first = 1
    for last in lengths:
        buckets.append(Bucket("nbig" if last is None else f"n{last}", first, last))
        first = 0 if last is None else last + 1
    return tuple(buckets)


def generic_tiles(kind: TileClass, bucket: Bucket) -> Tiles:
    """The tiles for every N of a bucket on any architecture, chosen by its longest row."""
    if kind.is_grouped:
        return Tiles(_group(kind, bucket.last, few=False), _group(kind, bucket.last, few=True))
    is_gated = kind.load is Load.GATE
    if kind.direction is Direction.BACKWARD:
        tile = (_GATED_BACKWARD if is_gated else _BACKWARD).tile(bucket.last, kind.itemsize)
        return Tiles(tile, tile)
    tile = (_gated_forward if is_gated else _forward)(bucket.last, kind.itemsize)
    return Tiles(tile, _forward_small(bucket.last, kind.itemsize))


def chunk(warps: int, itemsize: int) -> int:
    """Columns that so many warps read in one load of 16 bytes a thread."""
    return warps * WARP * LOAD_BYTES // itemsize


# (longest N, rows a program, warps): short rows are cut in two dimensions, so that a warp holds 1024 values or more.
_ROWS_TILES = ((128, 8, 1), (256, 4, 1), (512, 4, 2), (1024, 2, 1))

# (longest row in bytes, warps): a chunk is warps x 32 threads x 16 bytes, so 5120 bf16 values on 4 warps are exactly
# five chunks; more warps once a thread would hold over 48 values.
_ONE_PASS_TILES = ((4096, 2), (10240, 4), (24576, 8), (65536, 16))
_LONGEST_ONE_PASS = 16384

# (longest N, loads of 16 bytes in flight a thread), on 32 warps: from 32768 on one row no longer leaves room for a
# second program, and reading it again from L2 (3.84 TB/s on an H200) beats holding it (3.48).
_TWO_PASS_TILES = ((32768, 1), (None, 2))


def _forward(last: int | None, itemsize: int) -> Tile:
    if last is None or last > _LONGEST_ONE_PASS:
        return _two_pass(last, itemsize)
    for longest, rows, warps in _ROWS_TILES:
        if last <= longest:
            return Tile(Pipeline.ROWS, rows, longest, warps)
    warps = next(warps for most, warps in _ONE_PASS_TILES if last * itemsize <= most)
    return Tile(Pipeline.ONE_PASS, 1, chunk(warps, itemsize), warps)


# With a gate a thread holds half as many values, in 80 registers; of 32 it takes 157.
_GATED_ROWS_TILES = ((128, 4, 1), (256, 2, 1), (512, 2, 2), (1024, 2, 4))


def _gated_forward(last: int | None, itemsize: int) -> Tile:
    for longest, rows, warps in _GATED_ROWS_TILES:
        if last is not None and last <= longest:
            return Tile(Pipeline.ROWS, rows, longest, warps)
    return _forward(last, itemsize)


def _two_pass(last: int | None, itemsize: int) -> Tile:
    loads = next(loads for longest, loads in _TWO_PASS_TILES if longest is None or (last and last <= longest))
    return Tile(Pipeline.TWO_PASS, 1, chunk(MOST_WARPS, itemsize) * loads, MOST_WARPS)


# A few rows: what counts is how long one takes, so a thread holds at most 16 values (16x4096 takes 2.05 us on 8 warps
# of an H200), or 32 of the longest row that 32 warps still hold.
_SMALL_VALUES = 16
_LONGEST_SMALL_ONE_PASS = 32768


def _forward_small(last: int | None, itemsize: int) -> Tile:
    if last is None or last > _LONGEST_SMALL_ONE_PASS:
        return _two_pass(last, itemsize)
    warps = min(power_of_two(-(-last // (WARP * _SMALL_VALUES))), MOST_WARPS)
    return Tile(Pipeline.ONE_PASS, 1, min(chunk(warps, itemsize), power_of_two(last)), warps)


def power_of_two(least: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (least - 1).bit_length()


# Backward: (longest N, rows, warps, resident) of the two-dimensional tiles, 16 or 32 values of each operand a thread.
_BWD_ROWS_TILES = ((128, 8, 2, 8), (256, 8, 2, 4), (512, 4, 2, 4), (1024, 2, 4, 4))
# (longest N, warps, bytes a thread loads at once, resident): a thread holds this row's x and dy, the next row's, and a
# sum for each of two gradients; 16 to 24 values of each suit an H200 (3.4 to 3.7 TB/s). Two programs of 128 registers
# a thread beat one of 168 by 15 % at N = 5120.
_BWD_ONE_PASS_TILES = (
    (2048, 4, 16, 4),
    (3072, 4, 16, 3),
    (4096, 8, 16, 2),
    (5120, 8, 8, 2),
    (6144, 16, 8, 1),
    (8192, 16, 16, 1),
)
# Blocks of 2048 columns beat narrower ones by a tenth at N = 32768.
_BWD_TWO_PASS_TILE = Tile(Pipeline.TWO_PASS, rows=2, block=2048, warps=8, resident=2)


@dataclass(frozen=True)
class _Backward:
    """A rule for tiles of backward kernels: those of rows and of one_pass by the longest N, and that for all others."""

    rows: tuple[tuple[int, int, int, int], ...]
    one_pass: tuple[tuple[int, int, int, int], ...]
    two_pass: Tile

    def tile(self, last: int | None, itemsize: int) -> Tile:
        """The tile for every N of a bucket."""
        for longest, rows, warps, resident in self.rows:
            if last is not None and last <= longest:
                return Tile(Pipeline.ROWS, rows, longest, warps, resident)
        for longest, warps, load, resident in self.one_pass:
            if last is not None and last <= longest:
                return Tile(Pipeline.ONE_PASS, 1, warps * WARP * load // itemsize, warps, resident)
        return self.two_pass


_BACKWARD = _Backward(_BWD_ROWS_TILES, _BWD_ONE_PASS_TILES, _BWD_TWO_PASS_TILE)
# With a gate: a third row of each, and of the next, in 193 to 255 registers; with more values to a thread, or more
# programs, they spill.
_GATED_BACKWARD = _Backward(
    rows=((128, 8, 2, 4), (256, 4, 2, 4), (512, 2, 2, 4), (1024, 2, 4, 2)),
    one_pass=((2048, 4, 16, 2), (3072, 8, 16, 2), (4096, 16, 8, 1)),
    two_pass=replace(_BWD_TWO_PASS_TILE, resident=1),
)


# Groups, by (the longest that one program holds, warps), where they are many and where they are a few: 32 values a
# thread, or with dy 16 of each. Tiles are padded up to powers of two, so that a group may not fit; the runtime then
# takes the tile below.
_GROUP_TILES = {False: ((2048, 2), (4096, 4), (8192, 8)), True: ((1024, 2), (2048, 4), (4096, 8))}
# Of longer groups, over several programs each; of many groups a program takes more, or all of one.
GROUP_PARTS = Tile(Pipeline.TWO_PASS, rows=1, block=1024, warps=4, held=4)
GROUP_PARTS_BACKWARD = Tile(Pipeline.TWO_PASS, rows=2, block=1024, warps=4, held=2)
_RUNS_OF_MANY = 4


def _group(kind: TileClass, last: int | None, *, few: bool) -> Tile:
    is_backward = kind.direction is Direction.BACKWARD
    for longest, warps in _GROUP_TILES[few]:
        if last is not None and last <= longest:
            return Tile(Pipeline.ONE_PASS, 1, min(power_of_two(last), 1024), warps * 2 if is_backward else warps)
    parts = GROUP_PARTS_BACKWARD if is_backward else GROUP_PARTS
    return parts if few else replace(parts, rows=_RUNS_OF_MANY)


# Columns of a tile of several rows: a warp of fewer a row adds up more rows than it has lanes.
NARROWEST = 16

# The largest share of lanes that may be idle before another tile is sought, on an H200. Of several rows a program, each
# warp has idle lanes: LayerNorm of 192 columns in 256 takes 146 us, and 133 in three chunks of 64; of 440 columns in
# 512, 132 us, and 141 in chunks.
IDLE_OF_ROWS = 0.2
# LayerNorm masks each value of a chunk that is not full: 896 columns in 1024 took 146 us, 131 in two of 512.
IDLE_OF_MASKED = 0.1
# Others wait for memory, and idle warps cost little: RMSNorm of 1800 columns in 2048 takes 131 us, 134 in chunks; and
# gradients mask nothing: 384 columns of LayerNorm in 512 take 66 us, 70 in chunks.
IDLE = 0.25
# But rows that begin anywhere share what L2 writes at once with others: with an add, 1800 columns of LayerNorm took
# 276 us, and 265 where a program has two such rows.
IDLE_OF_UNALIGNED = 0.1
ALIGNED_BYTES = 64


def narrowed(tile: Tile, n: int, longest: int | None) -> Tile:
    """A tile of several rows for rows at most half as long as it is for: narrower, and of as many more of them.

    Of rows of 64 in a bucket of 128, say, half the lanes are idle otherwise.

    Args:
        tile: what a table has for a bucket.
        n: the row length.
        longest: the longest row of the bucket; None has no cap.
    """
    if tile.pipeline is not Pipeline.ROWS or longest is None:
        return tile
    widest = max(NARROWEST, power_of_two(n))
    times = min(power_of_two(longest) // widest, tile.block // NARROWEST)
    return replace(tile, rows=tile.rows * times, block=tile.block // times) if times > 1 else tile


def is_ragged(mode: Mode, tile: Tile, n: int) -> bool:
    """Whether rows leave so many of a tile's lanes idle that another may be faster; `tile` is for many rows.

    Idle are those of the threads that have some of a row's last values: where none has, no instruction is left.
    """
    itemsize = mode.dtype_in.itemsize
    at_once = min(tile.block, tile.warps * WARP * LOAD_BYTES // itemsize)
    taken = -(-n // at_once) * at_once
    if tile.pipeline is Pipeline.ROWS:
        most = IDLE_OF_ROWS
    elif mode.is_backward:
        most = IDLE
    elif mode.norm.centres and not mode.fadd.adds:
        most = IDLE_OF_MASKED
    else:
        most = IDLE if n * itemsize % ALIGNED_BYTES == 0 else IDLE_OF_UNALIGNED
    return taken - n > most * taken


# KiB of a multiprocessor, of the architectures with asynchronous copies: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability".
_SHARED_MEMORY = {
    "sm_80": 164,
    "sm_86": 100,
    "sm_87": 164,
    "sm_89": 100,
    "sm_90": 228,
    "sm_100": 228,
    "sm_103": 228,
    "sm_120": 100,
    "sm_121": 100,
}
# Of each program, KiB: one the driver keeps, the other is for its reductions.
_RESERVED = 2


def copies(arch: str) -> bool:
    """Whether an architecture copies from memory to shared memory while its threads do something else."""
    return arch in _SHARED_MEMORY


def most_stages(arch: str, resident: int, round_bytes: int, further: int = 0) -> int:
    """The most stages of a loop whose rounds have rows on their way, 1 if none can be.

    Args:
        arch: as tables of tiles name it.
        resident: programs that share a multiprocessor.
        round_bytes: what a program reads in a round.
        further: KiB of each program for what else passes through shared memory.
    """
    room = _SHARED_MEMORY.get(arch, 0) // resident - _RESERVED - further
    return 1 + max(room, 0) * 1024 // round_bytes


def with_room(tile: Tile, itemsizes: Collection[int], arch: str) -> Tile:
    """A tile of rows that programs share forward, with no more stages than shared memory has room for.

    These programs wait for one another: did they not all fit, none would be launched. A residual may have more bits
    than the x that a table's stages are for.

    Args:
        tile: what the table says.
        itemsizes: bytes of an element of each tensor whose rows are read.
        arch: as tables of tiles name it.
    """
    # A thread loads 16 bytes at once, so that values of 16 and 32 bits have to change places to be added: Triton 3.6
    # takes 1 KiB a warp for that.
    further = tile.warps if len(set(itemsizes)) > 1 else 0
    most = most_stages(arch, tile.resident, tile.held * tile.block * sum(itemsizes), further)
    return replace(tile, stages=min(tile.stages, most))
