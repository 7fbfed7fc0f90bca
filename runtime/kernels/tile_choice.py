"""Which tile a launch takes: the table's, as far as the GPU has room for it, or one for rows that start anywhere."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ..call_kinds import MOST_ROWS_IN_I32
from ..codegen.groups import AnyMode
from ..codegen.instance import Tile
from ..codegen.model import Mode
from ..codegen.tiling import WARP, most_stages
from ..codegen.values import Pipeline
from ..errors import DeviceError, InvarianceError
from .gpu import Target
from .pipelines import REGISTERS, VECTOR, column_blocks, row_of
from .strides import RowStride


def choose(mode: Mode, tiles: Iterable[Tile], n: int, target: Target) -> Tile:
    """The first of some tiles that a GPU can run: it has to hold all the programs that wait for one another.

    Where launches are plain none may wait.

    Raises:
        DeviceError: it can run none of them.
    """
    for tile in tiles:
        # The interpreter runs one program after another.
        held = target.multiprocessors * tile.resident if target.compiles else 1
        row = row_of(mode, tile.pipeline)
        if target.plainly and row.exchange is not None:
            held = 0
        waiting = row.waiting(tile, n)
        if waiting <= held:
            return tile
    raise DeviceError(
        f"{mode.name} at N = {n} takes {waiting} programs that wait for one another, and {target.arch} "
        f"with {target.multiprocessors} multiprocessors holds {held} at once; give N = {n} another pipeline in the "
        "table of tiles: normforge tune"
    )


def refuse_variant(mode: AnyMode, tile: Tile, n: int, m: int) -> None:
    """Refuse what would make the bits of a row depend on its batch.

    Raises:
        InvarianceError: rows are spread, or are more than kernels for fewer can count.
    """
    asked = (
        f"{mode.name} at N = {n} is to be batch invariant (NORMFORGE_BATCH_INVARIANT, an engine's switch, or "
        "batch_invariant)"
    )
    if not tile.pipeline.takes_rows_alike:
        raise InvarianceError(
            f"{asked}, and its tile for every M has pipeline {tile.pipeline.value}, with which a row's bits depend on "
            "where it stands; generate the folder anew, or give the class an invariant tile in its table"
        )
    if m > MOST_ROWS_IN_I32:
        raise InvarianceError(
            f"{asked}, and its kernels count {MOST_ROWS_IN_I32} rows, not {m}; split the batch, which changes no bits"
        )


# The least that hardware copies to shared memory at once, in bytes.
_WORD = 4


def staged(tile: Tile, unstaged: Tile, n: int, itemsizes: Collection[int], is_paired: bool, target: Target) -> Tile:
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
    columns = column_blocks(tile, n) * tile.block
    most = most_stages(target.arch, tile.resident, columns * sum(itemsizes)) if in_words and target.compiles else 1
    return replace(tile, stages=min(tile.stages, most)) if most > 1 else unstaged


# Rows so long and shorter ones are held where no vector starts them, even if others are read twice.
_LONGEST_WINDOW = 7168


def takes_window(mode: Mode, tile: Tile, n: int, strides: Mapping[str, RowStride], misaligned: Collection[str]) -> bool:
    """Whether rows of x and y start alike, and where no vector does, and there is a kernel for that."""
    stride = strides["x_row_stride"]
    return (
        (tile.pipeline is Pipeline.ONE_PASS or (tile.pipeline is Pipeline.TWO_PASS and n <= _LONGEST_WINDOW))
        and mode.has_window
        and isinstance(stride, int)
        and stride % VECTOR != 0
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


# By whether the mean is subtracted.
_WINDOWS = {True: _Window(1, 2.5), False: _Window(2, 2.0)}
# A thread's registers for addresses and temporaries.
_WINDOW_REGISTERS = 28
# Rows of N = 4099 on 4 warps: 3.57 TB/s, on 8: 3.32.
_WINDOW_WARPS = 4
_MOST_WINDOW_PROGRAMS = 16


def window_tile(mode: Mode, tile: Tile, n: int, few: bool) -> Tile:
    """The tile for rows that start anywhere, from the one for rows that do not; a few rows keep its warps."""
    window = _WINDOWS[mode.norm.centres]
    warps = tile.warps if few else min(tile.warps, _WINDOW_WARPS)
    block = 2 * window.pairs * WARP * warps
    values = -(-(n + VECTOR - 1) // block) * 2 * window.pairs
    needed = warps * WARP * (window.registers * values + _WINDOW_REGISTERS)
    resident = min(max(1, int(REGISTERS / needed)), _MOST_WINDOW_PROGRAMS)
    return replace(tile, block=block, warps=warps, resident=resident)
