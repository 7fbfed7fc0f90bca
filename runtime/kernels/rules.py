"""How many programs of each pipeline a launch takes, and what it needs beside its operands: one row a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch

from ..codegen import model
from ..codegen.model import Mode, Norm, Part, Pipeline
from ..codegen.staging import most_stages
from ..codegen.tiling import WARP, power_of_two
from ..errors import DeviceError
from ..selection.table import Tile
from ..upstream.torch_allocator import Empty
from ..upstream.triton_launcher import Grid
from .target import Target

AnyTile = TypeVar("AnyTile", bound=model.Tile)

# From a tile and N to a function from M to how many int64 a launch's programs exchange values through.
Exchange = Callable[[Tile, int], Callable[[int], int]]


@dataclass(frozen=True)
class Forward:
    """How a pipeline's forward kernel is launched.

    Attributes:
        grid: from a tile, N and a GPU to a function from M to the programs in each dimension.
        exchange: the size of `exchange_ptr`, which is filled with -1 for each launch; None where there is none.
        constants: from a tile and N to compile-time constants besides those of `constants`.
        options: what the compiler is told besides num_warps.
    """

    grid: Callable[[Tile, int, Target], Callable[[int], Grid]]
    exchange: Exchange | None = None
    constants: Callable[[model.Tile, int], Mapping[str, int]] = lambda tile, n: {}
    options: Mapping[str, Any] = field(default_factory=dict)


def _tiles_of_rows(tile: Tile, n: int, target: Target) -> Callable[[int], Grid]:
    rows = tile.rows
    return lambda m: (-(-m // rows), 1, 1)


# Programs that wait for one another all have to run at once, which a cooperative launch sees to.
_COOPERATIVE = {"launch_cooperative_grid": True}


def _slices(tile: model.Tile, n: int) -> int:
    """Programs that share a row, forward."""
    return -(-n // (tile.held * tile.block))


def _teams(tile: Tile, n: int, target: Target) -> Callable[[int], Grid]:
    slices = _slices(tile, n)
    most = target.multiprocessors * tile.resident // slices
    return lambda m: (slices, min(most, m), 1)


def _slot_a_slice(tile: Tile, n: int) -> Callable[[int], int]:
    slices = _slices(tile, n)
    return lambda m: m * slices


def _peers(slices: int) -> dict[str, int]:
    # With a slot for each lane of a warp none is held twice by one: 72 bytes less spilled of two rows of 16384.
    return {"PEERS": max(WARP, power_of_two(slices))}


FORWARD: dict[Pipeline, Forward] = {
    Pipeline.ROWS: Forward(_tiles_of_rows),
    Pipeline.ONE_PASS: Forward(_tiles_of_rows),
    Pipeline.TWO_PASS: Forward(_tiles_of_rows),
    Pipeline.SPREAD: Forward(_teams, _slot_a_slice, lambda tile, n: _peers(_slices(tile, n)), _COOPERATIVE),
}


@dataclass(frozen=True)
class Step:
    """One kernel of a backward pass.

    Attributes:
        part: which kernel of the pipeline; None is the one that carries its name.
        grid: from a tile and N to a function from M, and the number of programs that share the rows, to a grid.
        block: columns a chunk, from a tile.
    """

    part: Part | None
    grid: Callable[[Tile, int], Callable[[int, int], Grid]]
    block: Callable[[Tile], int] = lambda tile: tile.block


@dataclass(frozen=True)
class Backward:
    """How a pipeline computes gradients.

    Attributes:
        steps: its kernels, in order.
        column_blocks: how many programs share the columns of a row, from a tile and N.
        row_terms: what a first step leaves for the next: pointers to one fp32 value a row.
        exchange: as in `Forward`.
        constants: likewise.
        options: likewise.
    """

    steps: tuple[Step, ...]
    column_blocks: Callable[[Tile, int], int] = lambda tile, n: 1
    row_terms: tuple[str, ...] = ()
    exchange: Exchange | None = None
    constants: Callable[[model.Tile, int], Mapping[str, int]] = lambda tile, n: {}
    options: Mapping[str, Any] = field(default_factory=dict)

    def programs(self, tile: Tile, n: int, target: Target) -> int:
        """The most programs that share the rows: a function of the GPU and N, never of M."""
        # Blocks of columns fill the device already; each further program leaves a row of partial sums.
        return max(1, target.multiprocessors * tile.resident // self.column_blocks(tile, n))


def _column_blocks(tile: model.Tile, n: int) -> int:
    return -(-n // tile.block)


def _slot_a_row_and_block(tile: Tile, n: int) -> Callable[[int], int]:
    blocks, rows = _column_blocks(tile, n), tile.rows
    return lambda m: -(-m // rows) * rows * blocks


def _sharing_rows(tile: Tile, n: int) -> Callable[[int, int], Grid]:
    return lambda m, programs: (programs, 1, 1)


def _each_row(tile: Tile, n: int) -> Callable[[int, int], Grid]:
    return lambda m, programs: (m, 1, 1)


def _sharing_blocks(tile: Tile, n: int) -> Callable[[int, int], Grid]:
    blocks = _column_blocks(tile, n)
    return lambda m, programs: (blocks, programs, 1)


BACKWARD: dict[Pipeline, Backward] = {
    Pipeline.ROWS: Backward((Step(None, _sharing_rows),)),
    Pipeline.ONE_PASS: Backward((Step(None, _sharing_rows),)),
    Pipeline.TWO_PASS: Backward(
        (
            # A thread holds as many values of one row as it does of a tile of several.
            Step(Part.ROW_TERMS, _each_row, lambda tile: tile.rows * tile.block),
            Step(None, _sharing_blocks),
        ),
        _column_blocks,
        ("gh_mean_ptr", "g_mean_ptr"),
    ),
    Pipeline.SPREAD: Backward(
        (Step(None, _sharing_blocks),),
        _column_blocks,
        exchange=_slot_a_row_and_block,
        constants=lambda tile, n: _peers(_column_blocks(tile, n)),
        options=_COOPERATIVE,
    ),
}


def choose(mode: Mode, tiles: Iterable[Tile], n: int, target: Target) -> Tile:
    """The first of some tiles that a GPU can run: it has to hold all the programs that wait for one another.

    Raises:
        DeviceError: it can run none of them.
    """
    for tile in tiles:
        # The interpreter runs one program after another.
        held = target.multiprocessors * tile.resident if target.compiles else 1
        if _waiting(mode, tile, n) <= held:
            return tile
    raise DeviceError(
        f"{mode.name} at N = {n} takes {_waiting(mode, tile, n)} programs that wait for one another, and {target.arch} "
        f"with {target.multiprocessors} multiprocessors holds {held} at once; give N = {n} another pipeline in the "
        "table of tiles: normforge tune"
    )


def _waiting(mode: Mode, tile: Tile, n: int) -> int:
    if tile.pipeline is not Pipeline.SPREAD:
        return 1
    return _column_blocks(tile, n) if mode.is_backward else _slices(tile, n)


# Of a multiprocessor, and the most that a thread can address.
_REGISTERS = 65536
_MOST_REGISTERS_A_THREAD = 255


def compiler_options(options: Mapping[str, Any], tile: Tile, target: Target) -> dict[str, Any]:
    """What the compiler is told: what a pipeline asks, and so few registers that as many programs fit as should."""
    if not target.compiles:
        return {}
    # Given out by eights. One program always fits; AMD's compiler counts otherwise, and takes no such number.
    most = _REGISTERS // (tile.resident * tile.warps * WARP) // 8 * 8
    capped = tile.resident > 1 and most <= _MOST_REGISTERS_A_THREAD and target.is_nvidia
    return {**options, "maxnreg": most} if capped else dict(options)


# The least that hardware copies to shared memory at once, in bytes.
_WORD = 4


def staged(
    tile: AnyTile, unstaged: AnyTile, n: int, itemsizes: Collection[int], is_paired: bool, target: Target
) -> AnyTile:
    """A tile with as many stages as a GPU has room for in a backward launch, or one whose rows go to registers.

    Args:
        tile: what the table says, for rows in x's dtype.
        unstaged: what to take if no row can be on its way to shared memory: a staged tile leaves no registers for one.
        n: the row length.
        itemsizes: bytes of an element of each tensor whose rows are read.
        is_paired: whether 16-bit values may be read in pairs.
        target: the GPU.
    """
    if tile.stages == 1:
        return tile
    in_words = is_paired or min(itemsizes) >= _WORD
    columns = _column_blocks(tile, n) * tile.block
    most = most_stages(target.arch, tile.resident, columns * sum(itemsizes)) if in_words and target.compiles else 1
    return replace(tile, stages=min(tile.stages, most)) if most > 1 else unstaged


# Elements that a thread moves at once where rows start anywhere: 16 bytes of the 16-bit types.
_VECTOR = 8


# Rows so long and shorter ones are held where no vector starts them, even if others are read twice.
_LONGEST_WINDOW = 7168


def takes_window(mode: Mode, tile: Tile, n: int, strides: Mapping[str, int], misaligned: Collection[str]) -> bool:
    """Whether rows of x and y start alike, and where no vector does, and there is a kernel for that."""
    stride = strides["x_row_stride"]
    return (
        (tile.pipeline is Pipeline.ONE_PASS or (tile.pipeline is Pipeline.TWO_PASS and n <= _LONGEST_WINDOW))
        and mode.has_window
        and stride % _VECTOR != 0
        and stride == strides["y_row_stride"]
        and not {"x_ptr", "y_ptr"} & set(misaligned)
    )


@dataclass(frozen=True)
class _Window:
    """How rows that start anywhere are cut, on an H200.

    Attributes:
        pairs: neighbouring pairs that a thread has of a chunk: 2 of LayerNorm's make N = 5137 spill.
        registers: of a thread for each value: the row as fp32, half of the next one, and half of each operand.
    """

    pairs: int
    registers: float


_WINDOWS = {Norm.LAYER: _Window(1, 2.5), Norm.RMS: _Window(2, 2.0)}
# A thread's registers for addresses and temporaries.
_WINDOW_REGISTERS = 28
# Rows of N = 4099 on 4 warps: 3.57 TB/s, on 8: 3.32.
_WINDOW_WARPS = 4
_MOST_WINDOW_PROGRAMS = 16


def window_tile(mode: Mode, tile: AnyTile, n: int, few: bool) -> AnyTile:
    """The tile for rows that start anywhere, from the one for rows that do not; a few rows keep its warps."""
    window = _WINDOWS[mode.norm]
    warps = tile.warps if few else min(tile.warps, _WINDOW_WARPS)
    block = 2 * window.pairs * WARP * warps
    values = -(-(n + _VECTOR - 1) // block) * 2 * window.pairs
    needed = warps * WARP * (window.registers * values + _WINDOW_REGISTERS)
    resident = min(max(1, int(_REGISTERS / needed)), _MOST_WINDOW_PROGRAMS)
    return replace(tile, block=block, warps=warps, resident=resident)


def _windows(tile: Tile, n: int, target: Target) -> Callable[[int], Grid]:
    # Of a program that takes several rows all start as far from a vector, if programs are a multiple of VECTOR.
    most = max(_VECTOR, target.multiprocessors * tile.resident // _VECTOR * _VECTOR)
    return lambda m: (min(most, m), 1, 1)


WINDOW = Forward(_windows)


def constants(tile: Tile, n: int, row_alignment: int, misaligned: Collection[str], target: Target) -> dict[str, int]:
    """The compile-time constants that kernels may name: a tile's numbers in capitals, and what `signature` tells.

    Args:
        tile: how the kernel runs.
        n: the row length.
        row_alignment: see `kernels.row_alignment`.
        misaligned: pointers at no multiple of 16 bytes.
        target: the GPU that the kernel is for.
    """
    numbers = {f.name.upper(): getattr(tile, f.name) for f in fields(model.Tile) if f.name not in ("pipeline", "warps")}
    ptx = target.compiles and target.is_nvidia
    return {
        "N": n,
        "ROW_ALIGNMENT": row_alignment,
        "VECTOR": _VECTOR,
        "PAIRED": is_paired(n, row_alignment, misaligned),
        "PTX": ptx,
        "PDL": target.launches_early,
        **numbers,
    }


def is_paired(n: int, row_alignment: int, misaligned: Collection[str]) -> bool:
    """Whether 16-bit values may be read in pairs; the arguments are those of `constants`."""
    return n % 2 == 0 and row_alignment % 2 == 0 and not misaligned


def new_exchange(empty: Empty, count: int) -> torch.Tensor:
    """Memory for programs to exchange values through; -1 is what none leaves there."""
    return empty((count,), (1,), torch.int64).fill_(-1)
