"""How each pipeline is launched, forward and backward: one row each; and how many programs share rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from ..codegen.instance import Tile
from ..codegen.model import Mode
from ..codegen.tiling import WARP, power_of_two
from ..codegen.values import Part, Pipeline
from .gpu import Target

if TYPE_CHECKING:
    from ..upstream.triton_launcher import Grid

# Elements that a thread moves at once where rows start anywhere: 16 bytes of the 16-bit types.
VECTOR = 8

# Of a multiprocessor, and the most that a thread can address.
REGISTERS = 65536
_MOST_REGISTERS_A_THREAD = 255


class Programs(Protocol):
    """From M, and backward how many programs share the rows, to the programs in each dimension."""

    def __call__(self, m: int, programs: int = 1) -> Grid:
        """The grid of a launch."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One kernel of a pipeline.

    Attributes:
        grid: from a tile, N and a GPU to its programs.
        part: which kernel; None is the one that carries the pipeline's name.
        block: columns a chunk, from a tile.
    """

    grid: Callable[[Tile, int, Target], Programs]
    part: Part | None = None
    block: Callable[[Tile], int] = lambda tile: tile.block


@dataclass(frozen=True, kw_only=True)
class Row:
    """How a pipeline is launched in one direction.

    Attributes:
        steps: its kernels, in order.
        columns: how many programs share the columns of a row, from a tile and N.
        row_terms: what a first step leaves for the next: pointers to one fp32 value a row.
        exchange: from a tile and N to a function from M to how many int64 programs that share a row, and wait for one
            another, exchange values through; None where none wait. The memory is filled with -1 for each launch.
        constants: from a tile and N to compile-time constants besides those of `constants`.
        options: what the compiler is told besides num_warps.
    """

    steps: tuple[Step, ...]
    columns: Callable[[Tile, int], int] = lambda tile, n: 1
    row_terms: tuple[str, ...] = ()
    exchange: Callable[[Tile, int], Callable[[int], int]] | None = None
    constants: Callable[[Tile, int], Mapping[str, int]] = lambda tile, n: {}
    options: Mapping[str, Any] = field(default_factory=dict)

    def programs(self, tile: Tile, n: int, target: Target) -> int:
        """The most programs that share the rows: a function of the GPU and N, never of M."""
        # Blocks of columns fill the device already; each further program leaves a row of partial sums.
        return max(1, target.multiprocessors * tile.resident // self.columns(tile, n))

    def waiting(self, tile: Tile, n: int) -> int:
        """How many programs wait for one another, and so have to run at once."""
        return 1 if self.exchange is None else self.columns(tile, n)


def _slices(tile: Tile, n: int) -> int:
    return -(-n // (tile.held * tile.block))


def column_blocks(tile: Tile, n: int) -> int:
    """The chunks of columns that a row has."""
    return -(-n // tile.block)


def _tiles_of_rows(tile: Tile, n: int, target: Target) -> Programs:
    rows = tile.rows
    return lambda m, programs=1: (-(-m // rows), 1, 1)


def _teams(tile: Tile, n: int, target: Target) -> Programs:
    slices = _slices(tile, n)
    most = target.multiprocessors * tile.resident // slices
    return lambda m, programs=1: (slices, min(most, m), 1)


def _windows(tile: Tile, n: int, target: Target) -> Programs:
    # Of a program that takes several rows all start as far from a vector, if programs are a multiple of VECTOR.
    most = max(VECTOR, target.multiprocessors * tile.resident // VECTOR * VECTOR)
    return lambda m, programs=1: (min(most, m), 1, 1)


def _sharing_rows(tile: Tile, n: int, target: Target) -> Programs:
    return lambda m, programs=1: (programs, 1, 1)


def _each_row(tile: Tile, n: int, target: Target) -> Programs:
    return lambda m, programs=1: (m, 1, 1)


def _sharing_blocks(tile: Tile, n: int, target: Target) -> Programs:
    blocks = column_blocks(tile, n)
    return lambda m, programs=1: (blocks, programs, 1)


def _slot_a_slice(tile: Tile, n: int) -> Callable[[int], int]:
    slices = _slices(tile, n)
    return lambda m: m * slices


def _slot_a_row_and_block(tile: Tile, n: int) -> Callable[[int], int]:
    blocks, rows = column_blocks(tile, n), tile.rows
    return lambda m: -(-m // rows) * rows * blocks


def _peers(programs: int) -> dict[str, int]:
    # With a slot for each lane of a warp none is held twice by one: 72 bytes less spilled of two rows of 16384.
    return {"PEERS": max(WARP, power_of_two(programs))}


# Programs that wait for one another all have to run at once, which a cooperative launch sees to.
COOPERATIVE = {"launch_cooperative_grid": True}

FORWARD: dict[Pipeline, Row] = {
    **dict.fromkeys((Pipeline.ROWS, Pipeline.ONE_PASS, Pipeline.TWO_PASS), Row(steps=(Step(grid=_tiles_of_rows),))),
    Pipeline.SPREAD: Row(
        steps=(Step(grid=_teams),),
        columns=_slices,
        exchange=_slot_a_slice,
        constants=lambda tile, n: _peers(_slices(tile, n)),
        options=COOPERATIVE,
    ),
}

# Forward, in place of ONE_PASS or TWO_PASS where `tile_choice.takes_window`.
WINDOW = Row(steps=(Step(grid=_windows, part=Part.WINDOW),))

BACKWARD: dict[Pipeline, Row] = {
    **dict.fromkeys((Pipeline.ROWS, Pipeline.ONE_PASS), Row(steps=(Step(grid=_sharing_rows),))),
    Pipeline.TWO_PASS: Row(
        steps=(
            # A thread holds as many values of one row as it does of a tile of several.
            Step(grid=_each_row, part=Part.ROW_TERMS, block=lambda tile: tile.rows * tile.block),
            Step(grid=_sharing_blocks),
        ),
        columns=column_blocks,
        row_terms=("gh_mean_ptr", "g_mean_ptr"),
    ),
    Pipeline.SPREAD: Row(
        steps=(Step(grid=_sharing_blocks),),
        columns=column_blocks,
        exchange=_slot_a_row_and_block,
        constants=lambda tile, n: _peers(column_blocks(tile, n)),
        options=COOPERATIVE,
    ),
}


def row_of(mode: Mode, pipeline: Pipeline) -> Row:
    """How a pipeline is launched in the direction of a mode."""
    return (BACKWARD if mode.is_backward else FORWARD)[pipeline]


# Each wave starts anew, and each program leaves sums, which takes a program about as long as so many rows.
_MOST_WAVES = 4
_START = 4


def programs_a_part(most: int, parts: int, tiles: int) -> int:
    """Return how many programs share the tiles of a part.

    The programs that the GPU runs at once make a wave, and what counts is how many tiles waves take in turn. One
    program more than a wave's is another wave: with 17 programs for each of 32 samples where 528 run, 16 wait until all
    others have ended.

    Args:
        most: programs that run at once.
        parts: how many parts there are, of as many tiles each.
        tiles: tiles of a part.

    Returns:
        The number with which waves take the fewest tiles in turn, the smallest of such numbers.
    """

    def taken(each: int) -> tuple[int, int]:
        return -(-parts * each // most) * (-(-tiles // each) + _START), each

    # As many as fit into each number of waves, less those without which none takes more tiles.
    most_of_each = [max(1, min(waves * most // parts, tiles)) for waves in range(1, _MOST_WAVES + 1)]
    return min((-(-tiles // -(-tiles // each)) for each in most_of_each), key=taken)


def compiler_options(options: Mapping[str, Any], tile: Tile, target: Target) -> dict[str, Any]:
    """What the compiler is told: what a pipeline asks, and so few registers that as many programs fit as should."""
    if not target.compiles:
        return {}
    # Given out by eights. One program always fits; AMD's compiler counts otherwise, and takes no such number.
    most = REGISTERS // (tile.resident * tile.warps * WARP) // 8 * 8
    capped = tile.resident > 1 and most <= _MOST_REGISTERS_A_THREAD and target.is_nvidia
    return {**options, "maxnreg": most} if capped else dict(options)


def constants(tile: Tile, n: int, row_alignment: int, misaligned: Collection[str], target: Target) -> dict[str, int]:
    """The compile-time constants that kernels may name: a tile's numbers in capitals, and what `signature` tells.

    Args:
        tile: how the kernel runs.
        n: the row length.
        row_alignment: see `row_alignment`.
        misaligned: pointers at no multiple of 16 bytes.
        target: the GPU that the kernel is for.
    """
    numbers = {f.name.upper(): getattr(tile, f.name) for f in fields(Tile) if f.name not in ("pipeline", "warps")}
    ptx = target.compiles and target.is_nvidia
    return {
        "N": n,
        "ROW_ALIGNMENT": row_alignment,
        "VECTOR": VECTOR,
        "PAIRED": is_paired(n, row_alignment, misaligned),
        "PTX": ptx,
        "PDL": target.launches_early,
        **numbers,
    }


def is_paired(n: int, row_alignment: int, misaligned: Collection[str]) -> bool:
    """Whether 16-bit values may be read in pairs; the arguments are those of `constants`."""
    return n % 2 == 0 and row_alignment % 2 == 0 and not misaligned
