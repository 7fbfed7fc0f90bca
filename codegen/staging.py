"""Rows on their way to shared memory: which GPUs copy them there by themselves, and how many fit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .instance import Tile

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
