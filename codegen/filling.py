"""How far rows fill a tile: which lanes they leave idle, and what is taken of those that leave many."""

from __future__ import annotations

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
