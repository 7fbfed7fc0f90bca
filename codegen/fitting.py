"""How far rows fill a tile and what is taken where many lanes are idle; and how many rows fit into shared memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .instance import Tile
from .model import Mode
from .tiling import LOAD_BYTES, WARP, power_of_two
from .values import Pipeline

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
