"""The standard ladder of row lengths, the generic tiles for unmeasured cases, and the limits of rows and GPUs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from math import log2

from .groups import AnyMode, GroupMode
from .instance import Bucket, Tile, Tiles
from .model import Mode
from .values import Direction, Pipeline

# The last length of each bucket: hidden sizes of common models, so that a row fills its chunks.
STANDARD_LENGTHS = (
    *(128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384),
    *(32768, 65536, 131072, None),
)

# Up to this number of rows an instance takes its tile for few rows, which is chosen at 64 rows. The tile for many rows
# is chosen at 512 of the longest rows, 262144: those 512 rows take 159 us of an H200 with it, and 163 with the tile for
# few.
SMALL_M = 256
# Above SMALL_M and up to this number of rows an instance takes its tile for some rows, if it has one, which is chosen
# at 512 rows. These rows are at most one wave of programs, which took up to 15 % longer than peers with the tile for
# many.
SOME_M = 2048

WARP = 32
MOST_WARPS = 32
MOST_RESIDENT_WARPS = 64
LOAD_BYTES = 16
# Elements that a thread moves at once if rows may start anywhere: 16 bytes of the 16-bit types.
VECTOR = 8
# Registers per multiprocessor.
REGISTERS = 65536


class Load(Enum):
    """The data that a kernel moves and holds, as far as its tile depends on it; the value is part of class names.

    - PLAIN is x and y alone. ADD is more than these; backward, ADD reads a stored sum's gradient besides dy and x.
    - QUANT is y with one scale per row.
    - SCALED is y with one scale per group or with a static scale, for which no row is held or read again. ADD_SCALED is
      SCALED with an add. SCALED has tiles of its own because ADD_SCALED's took 16384x7168 of RMSNorm without an add
      127 us on an H200 (a2da303), where 18724 rows take 111 with SCALED's (312f89b).
    - GATE has a gate of x's shape, whose activation takes registers and time.
    - DROP is ADD with dropout, whose mask takes time whenever x is read.
    - MODULATE is ADD with a scale and a shift per row.
    - FP8 is an 8-bit x with a scale and nothing else, converted to 16 bits.
    - REDUCE waits for rows of other GPUs. Its tiles follow from the rule alone, as `normforge tune` times one GPU; a
      chunk has a value or more for every thread.
    - RENORM is two norms around an add. Forward, kernels that hold no row read x and the residual three times.

    If a table has no tiles for SCALED, ADD_SCALED, DROP, MODULATE, FP8, RENORM or, backward, ADD, these take the tiles
    of `TileClass.alike`.
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
    RENORM = "_renorm"
    REDUCE = "_reduce"


@dataclass(frozen=True)
class TileClass:
    """Modes that share their tiles.

    Attributes:
        direction: the direction of the kernels.
        itemsize: bytes per element of x.
        load: the data that kernels move and hold.
        rms: True for the norms that keep the mean alone, RMSNorm for example. If a table has no tiles for these, they
            take the tiles that they share with LayerNorm, which were measured with LayerNorm's kernels.
        layout: for GroupNorm, whether positions or channels are innermost; "" for norms of rows.
    """

    direction: Direction
    itemsize: int
    load: Load = Load.PLAIN
    rms: bool = False
    layout: str = ""

    @property
    def name(self) -> str:
        """Return the word for this class in tables of tiles and on the command line."""
        rms = "_rms" if self.rms else ""
        return f"{self.layout}{self.direction.value}_{8 * self.itemsize}bit{self.load.value}{rms}"

    @property
    def is_grouped(self) -> bool:
        """Return True if rows are groups of channels."""
        return bool(self.layout)

    @property
    def shared(self) -> TileClass:
        """Return the class that both norms share."""
        return replace(self, rms=False)

    @property
    def alike(self) -> tuple[TileClass, ...]:
        """Return the classes whose tiles can serve this class, its own first."""
        own = (self, self.shared)
        if self.load in (Load.SCALED, Load.ADD_SCALED):
            # A tile that holds a row for its scale also serves a class that need not hold the row.
            return (*own, *replace(self, load=Load.QUANT).alike)
        if self.load is Load.MODULATE:
            # Backward, tiles of other classes spread rows; kernels of this class do not.
            return own if self.direction is Direction.BACKWARD else (*own, *replace(self, load=Load.ADD).alike)
        if self.load is Load.FP8:
            return (*own, *replace(self, load=Load.ADD).alike)
        if self.load is Load.ADD and self.direction is Direction.BACKWARD:
            # ADD reads one more gradient. No table has tiles for fp32 rows: on sm_90 threads spill up to 48 bytes with
            # PLAIN's tiles, and up to 240 with the generic ones.
            return (*own, *replace(self, load=Load.PLAIN).alike)
        if self.load not in (Load.DROP, Load.RENORM):
            return own
        # Forward, a mask is drawn whenever x is read, and QUANT's tiles read x once: with ADD's tiles, which read long
        # rows twice, 32768x4096 took an H200 433 us where the add alone took 253 (e2343cb). ADD's tiles would read x of
        # two norms three times. Backward, x is read once.
        load = Load.QUANT if self.direction is Direction.FORWARD else Load.ADD
        return (*own, *replace(self, load=load).alike)


_LEAST_ITEMSIZE = 2

# Prefixes of GroupNorm's class names, with positions innermost and with channels innermost.
GROUP_LAYOUTS = ("group_", "group_last_")

_BACKWARD_LOADS = (Load.PLAIN, Load.ADD, Load.GATE, Load.DROP, Load.MODULATE)
CLASSES = tuple(
    TileClass(direction, itemsize, load, rms)
    for direction, loads in ((Direction.FORWARD, tuple(Load)), (Direction.BACKWARD, _BACKWARD_LOADS))
    for itemsize, load, rms in product((_LEAST_ITEMSIZE, 4), loads, (False, True))
    if load is not Load.REDUCE and (load is not Load.FP8 or itemsize == _LEAST_ITEMSIZE)
)
GROUP_CLASSES = tuple(
    TileClass(direction, itemsize, layout=layout)
    for direction, itemsize, layout in product(Direction, (_LEAST_ITEMSIZE, 4), GROUP_LAYOUTS)
)
EVERY_CLASS = (*CLASSES, *GROUP_CLASSES)


def class_of(mode: AnyMode) -> TileClass:
    """Return the class of a mode; if kernels compute a row's scale, a fused add makes no further difference.

    fp8 rows are split as 16-bit rows, to which they are converted: a thread that stores 16 bytes of y at once loads 8
    bytes of x. They do not belong to the modes that stream, whose tables have pipelines that take x as read.
    """
    if isinstance(mode, GroupMode):
        return TileClass(mode.direction, mode.dtype_in.itemsize, layout=GROUP_LAYOUTS[mode.channels_last])
    load = Load.PLAIN
    if mode.reduce.exchanges:
        load = Load.REDUCE
    elif mode.fquant.quantises and not mode.is_backward:
        scaled = Load.ADD_SCALED if mode.fadd.adds else Load.SCALED
        load = scaled if mode.scales_locally else Load.QUANT
    elif mode.gating.gates:
        load = Load.GATE
    elif mode.dropout:
        load = Load.DROP
    elif mode.fadd.renorms:
        load = Load.RENORM
    elif mode.modulated:
        load = Load.MODULATE
    elif mode.dtype_in.is_fp8 and not mode.fadd.adds:
        load = Load.FP8
    elif mode.fadd.stores if mode.is_backward else not mode.streams:
        load = Load.ADD
    return TileClass(mode.direction, max(mode.dtype_in.itemsize, _LEAST_ITEMSIZE), load, not mode.norm.centres)


def standard_ladder() -> tuple[Bucket, ...]:
    """Return the buckets of a manifest that names none."""
    return ladder_of(STANDARD_LENGTHS)


def ladder_of(lengths: tuple[int | None, ...]) -> tuple[Bucket, ...]:
    """Return adjacent buckets with the given last lengths, in ascending order; None is the bucket without a cap."""
    buckets = []
    first = 1
    for last in lengths:
        buckets.append(Bucket("nbig" if last is None else f"n{last}", first, last))
        first = 0 if last is None else last + 1
    return tuple(buckets)


def generic_tiles(kind: TileClass, bucket: Bucket) -> Tiles:
    """Return the tiles for every N of a bucket on any architecture, chosen by the bucket's longest row."""
    if kind.is_grouped:
        return Tiles(_group(kind, bucket.last, few=False), _group(kind, bucket.last, few=True))
    if kind.load is Load.REDUCE:
        return Tiles(*[_reduced(bucket.last, kind.itemsize, *each) for each in _REDUCED])
    is_gated = kind.load is Load.GATE
    if kind.direction is Direction.BACKWARD:
        tile = (_GATED_BACKWARD if is_gated else _BACKWARD).tile(bucket.last, kind.itemsize)
        return Tiles(tile, tile)
    tile = (_gated_forward if is_gated else _forward)(bucket.last, kind.itemsize)
    return Tiles(tile, _forward_small(bucket.last, kind.itemsize))


def chunk(warps: int, itemsize: int) -> int:
    """Return the number of columns that `warps` warps read in one load of 16 bytes per thread."""
    return warps * WARP * LOAD_BYTES // itemsize


# (longest N, rows per program, warps): tiles of short rows are two-dimensional, so that a warp holds 1024 values or
# more.
_ROWS_TILES = ((128, 8, 1), (256, 4, 1), (512, 4, 2), (1024, 2, 1))

# (longest row in bytes, warps): a chunk is warps x 32 threads x 16 bytes, so 5120 bf16 values on 4 warps are exactly
# five chunks. Use more warps once a thread would hold more than 48 values.
_ONE_PASS_TILES = ((4096, 2), (10240, 4), (24576, 8), (65536, 16))
_LONGEST_ONE_PASS = 16384

# (longest N, 16-byte loads in flight per thread), on 32 warps: from 32768 on, one row leaves no room for a second
# program, and reading the row again from L2 (3.84 TB/s on an H200) beats holding it (3.48).
_TWO_PASS_TILES = ((32768, 1), (None, 2))


def _forward(last: int | None, itemsize: int) -> Tile:
    if last is None or last > _LONGEST_ONE_PASS:
        return _two_pass(last, itemsize)
    for longest, rows, warps in _ROWS_TILES:
        if last <= longest:
            return Tile(Pipeline.ROWS, rows, longest, warps)
    warps = next(warps for most, warps in _ONE_PASS_TILES if last * itemsize <= most)
    return Tile(Pipeline.ONE_PASS, 1, chunk(warps, itemsize), warps)


# With a gate, a thread holds half as many values, in 80 registers; 32 values would take 157.
_GATED_ROWS_TILES = ((128, 4, 1), (256, 2, 1), (512, 2, 2), (1024, 2, 4))


def _gated_forward(last: int | None, itemsize: int) -> Tile:
    for longest, rows, warps in _GATED_ROWS_TILES:
        if last is not None and last <= longest:
            return Tile(Pipeline.ROWS, rows, longest, warps)
    return _forward(last, itemsize)


# Rows behind an exchange stay in registers.
LONGEST_REDUCED = 32768
# Elements that rows of an inbox are padded to a multiple of, so that each starts at a multiple of 16 bytes.
INBOX_PADDING = 8
# Values that a thread has of a row, and the longest chunk, for many rows and for few. 4096 rows of 8192 that are
# quantised take 191 us on two H200s, and took 199 us in one chunk; others take 190 us either way (h200-reduced, at
# 203f1dd1 and 67c28fb2).
_REDUCED = ((16, 4096), (8, 8192))


def _reduced(last: int | None, itemsize: int, values: int, longest: int) -> Tile:
    length = LONGEST_REDUCED if last is None else power_of_two(max(last, WARP))
    block = min(chunk(MOST_WARPS, itemsize), longest, length)
    # No thread has less than one load of a chunk.
    return Tile(Pipeline.ONE_PASS, 1, block, max(1, min(length // (WARP * values), block // (WARP * 8), MOST_WARPS)))


def _two_pass(last: int | None, itemsize: int) -> Tile:
    loads = next(loads for longest, loads in _TWO_PASS_TILES if longest is None or (last and last <= longest))
    return Tile(Pipeline.TWO_PASS, 1, chunk(MOST_WARPS, itemsize) * loads, MOST_WARPS)


# For few rows the latency of one row counts, so a thread holds at most 16 values (16x4096 takes 2.05 us on 8 warps of
# an H200), or 32 values of the longest row that 32 warps can hold.
_SMALL_VALUES = 16
_LONGEST_SMALL_ONE_PASS = 32768


def _forward_small(last: int | None, itemsize: int) -> Tile:
    if last is None or last > _LONGEST_SMALL_ONE_PASS:
        return _two_pass(last, itemsize)
    warps = min(power_of_two(-(-last // (WARP * _SMALL_VALUES))), MOST_WARPS)
    return Tile(Pipeline.ONE_PASS, 1, min(chunk(warps, itemsize), power_of_two(last)), warps)


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def columns_across(heads: int, n: int, rotated: int) -> int:
    """Return the columns of a row of all heads, heads and both columns of pairs rounded up to powers of two."""
    return power_of_two(heads) * max(2 * power_of_two(rotated // 2), power_of_two(max(1, n - rotated)))


# Backward: (longest N, rows, warps, resident) of two-dimensional tiles; a thread holds 16 or 32 values of each operand.
_BWD_ROWS_TILES = ((128, 8, 2, 8), (256, 8, 2, 4), (512, 4, 2, 4), (1024, 2, 4, 4))
# (longest N, warps, bytes that a thread loads at once, resident): a thread holds this row's x and dy, the next row's,
# and one sum for each of two gradients; 16 to 24 values of each suit an H200 (3.4 to 3.7 TB/s). Two programs with 128
# registers per thread beat one with 168 by 15 % at N = 5120.
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
    """A rule for backward tiles: tiles of rows and of one_pass by the longest N, and one tile for longer rows."""

    rows: tuple[tuple[int, int, int, int], ...]
    one_pass: tuple[tuple[int, int, int, int], ...]
    two_pass: Tile

    def tile(self, last: int | None, itemsize: int) -> Tile:
        """Return the tile for every N of a bucket."""
        for longest, rows, warps, resident in self.rows:
            if last is not None and last <= longest:
                return Tile(Pipeline.ROWS, rows, longest, warps, resident)
        for longest, warps, load, resident in self.one_pass:
            if last is not None and last <= longest:
                return Tile(Pipeline.ONE_PASS, 1, warps * WARP * load // itemsize, warps, resident)
        return self.two_pass


_BACKWARD = _Backward(_BWD_ROWS_TILES, _BWD_ONE_PASS_TILES, _BWD_TWO_PASS_TILE)
# With a gate, threads hold a third row of the current and the next tile, in 193 to 255 registers. With more values per
# thread or more programs they spill.
_GATED_BACKWARD = _Backward(
    rows=((128, 8, 2, 4), (256, 4, 2, 4), (512, 2, 2, 4), (1024, 2, 4, 2)),
    one_pass=((2048, 4, 16, 2), (3072, 8, 16, 2), (4096, 16, 8, 1)),
    two_pass=replace(_BWD_TWO_PASS_TILE, resident=1),
)


# (longest group that one program holds, warps), for many groups and for few: 32 values per thread, or backward 16 of x
# and 16 of dy. Tiles are padded to powers of two, so that a group may not fit; the runtime then takes GROUP_PARTS.
_GROUP_TILES = {False: ((2048, 2), (4096, 4), (8192, 8)), True: ((1024, 2), (2048, 4), (4096, 8))}
# Longer groups are split over several programs. With many groups a program takes more of a group, or all of it.
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


# The smallest number of columns in a tile of several rows: with fewer columns per row, a warp sums more rows than it
# has lanes.
NARROWEST = 16

# The largest share of lanes that may be idle before another tile is sought, measured on an H200. With several rows per
# program, each warp has idle lanes: LayerNorm of 192 columns in 256 takes 146 us, and 133 in three chunks of 64; of 440
# columns in 512, 132 us, and 141 in chunks.
IDLE_OF_ROWS = 0.2
# LayerNorm masks each value of a chunk that is not full: 896 columns in 1024 took 146 us, and 131 in two chunks of 512.
IDLE_OF_MASKED = 0.1
# Other modes wait for memory, so idle warps cost little: RMSNorm of 1800 columns in 2048 takes 131 us, and 134 in
# chunks. Gradients mask nothing: 384 columns of LayerNorm in 512 take 66 us, and 70 in chunks.
IDLE = 0.25
# Unaligned rows share the sectors that L2 writes at once with other rows: with an add, 1800 columns of LayerNorm took
# 276 us, and 265 if a program has two such rows.
IDLE_OF_UNALIGNED = 0.1
ALIGNED_BYTES = 64


def narrowed(tile: Tile, n: int, longest: int | None) -> Tile:
    """Return a tile with fewer columns and more rows, for rows at most half as long as a tile of several rows is wide.

    Otherwise half the lanes would be idle, for rows of 64 in a bucket of 128 for example.

    Args:
        tile: the table's tile for a bucket.
        n: the row length.
        longest: the longest row of the bucket; None means no cap.
    """
    if tile.pipeline is not Pipeline.ROWS or longest is None:
        return tile
    widest = max(NARROWEST, power_of_two(n))
    times = min(power_of_two(longest) // widest, tile.block // NARROWEST)
    return replace(tile, rows=tile.rows * times, block=tile.block // times) if times > 1 else tile


def is_ragged(mode: Mode, tile: Tile, n: int) -> bool:
    """Return True if rows leave so many lanes of `tile`, the tile for many rows, idle that another may be faster.

    Only lanes of threads that load the last values of a row count as idle: where no lane has a value, no instruction is
    executed.
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


# KiB of shared memory per multiprocessor, of the architectures with asynchronous copies: CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability".
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
# KiB that each program reserves: 1 for the driver, 1 for its reductions.
_RESERVED = 2


def copies(arch: str) -> bool:
    """Return True if an architecture can copy from global to shared memory asynchronously."""
    return arch in _SHARED_MEMORY


def most_stages(arch: str, resident: int, round_bytes: int, further: int = 0) -> int:
    """Return the largest number of stages of a loop over rows in flight, or 1 if none can be in flight.

    Args:
        arch: the architecture, as tables of tiles name it.
        resident: programs that share a multiprocessor.
        round_bytes: bytes that a program reads per round.
        further: KiB per program for other data that passes through shared memory.
    """
    room = _SHARED_MEMORY.get(arch, 0) // resident - _RESERVED - further
    return 1 + max(room, 0) * 1024 // round_bytes


def with_room(tile: Tile, itemsizes: Collection[int], arch: str) -> Tile:
    """Return a tile of the forward spread pipeline with no more stages than shared memory has room for.

    These programs wait for one another, so if not all of them fit, none is launched. A residual may have more bits than
    the x that a table's stages are for.

    Args:
        tile: the table's tile.
        itemsizes: bytes per element of each tensor whose rows are read.
        arch: the architecture, as tables of tiles name it.
    """
    # A thread loads 16 bytes at once, so 16-bit and 32-bit values must be exchanged between threads before they are
    # added. Triton 3.6 takes 1 KiB per warp for the exchange.
    further = tile.warps if len(set(itemsizes)) > 1 else 0
    most = most_stages(arch, tile.resident, tile.held * tile.block * sum(itemsizes), further)
    return replace(tile, stages=min(tile.stages, most))


# The division of rows that start anywhere, measured on an H200, by whether the mean is subtracted. First, adjacent
# pairs of a chunk per thread: with 2, LayerNorm at N = 5137 spills. Second, registers of a thread per value: the row as
# fp32, half of the next row, and half of each operand.
_WINDOWS = {True: (1, 2.5), False: (2, 2.0)}
# Registers per thread for addresses and temporaries.
_WINDOW_REGISTERS = 28
# Rows of N = 4099 run at 3.57 TB/s on 4 warps, and at 3.32 TB/s on 8.
_WINDOW_WARPS = 4
_MOST_WINDOW_PROGRAMS = 16


def window_tile(mode: Mode, tile: Tile, n: int, few: bool) -> Tile:
    """Return the tile for unaligned rows, derived from the tile for aligned rows; a few rows keep the tile's warps."""
    pairs, registers = _WINDOWS[mode.norm.centres]
    warps = tile.warps if few else min(tile.warps, _WINDOW_WARPS)
    block = 2 * pairs * WARP * warps
    values = -(-(n + VECTOR - 1) // block) * 2 * pairs
    needed = warps * WARP * (registers * values + _WINDOW_REGISTERS)
    resident = min(max(1, int(REGISTERS / needed)), _MOST_WINDOW_PROGRAMS)
    return replace(tile, block=block, warps=warps, resident=resident)


def unaligned_tile(n: int) -> Tile:
    """Return the tile for unaligned rows that are read twice: chunks of about a fourth of a row.

    In 84 cells of 571 to 124,483 columns on an H200 it takes 1.03 times as long as the best of six tiles in the
    geometric mean, and at most 1.28 times.
    """
    block = min(max(256, 2 ** round(log2(n / 4))), 16384)
    # Threads have 8 values up to 8 warps, and 16 beyond.
    warps = max(min(block // (8 * WARP), 8), block // (16 * WARP))
    return Tile(Pipeline.TWO_PASS, rows=1, block=block, warps=warps)
