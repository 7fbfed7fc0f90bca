"""Pipelines: the launch of each pipeline, forward and backward, and the choice of a tile from the table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ..call_kinds import MOST_ROWS_IN_I32
from ..codegen.groups import AnyMode
from ..codegen.instance import Tile
from ..codegen.model import Mode
from ..codegen.tile_limits import LONGEST_GROUP
from ..codegen.tiling import REGISTERS, VECTOR, WARP, most_stages, unaligned_tile, window_tile
from ..codegen.values import Part, Pipeline
from ..errors import DeviceError, InvarianceError
from .gpu import Target
from .strides import RowStride, row_alignment

if TYPE_CHECKING:
    from ..upstream.triton_launcher import Grid

# The most registers that a thread can address.
_MOST_REGISTERS_A_THREAD = 255


@dataclass(frozen=True, kw_only=True)
class Step:
    """One kernel of a pipeline.

    Attributes:
        counts: what there is a program for in each dimension of the grid, by the words of `grid`.
        part: the kernel; None is the kernel with the pipeline's name.
        tile: a function from the pipeline's tile to that of the kernel.
        columns: a function from the kernel's tile and N to the number of programs that share the columns of a row; None
            is the pipeline's.
    """

    counts: tuple[str, ...]
    part: Part | None = None
    tile: Callable[[Tile], Tile] = lambda tile: tile
    columns: Callable[[Tile, int], int] | None = None

    def grid(self, tile: Tile, columns: int, target: Target, m: int, programs: int) -> Grid:
        """Return the programs in each dimension of a launch.

        Args:
            tile: the tile that the kernel runs with.
            columns: the number of programs that share the columns of a row.
            target: the GPU.
            m: the number of rows.
            programs: the number of programs that share the rows.
        """
        tiles = -(-m // tile.rows)
        # If the number of programs is a multiple of VECTOR, all rows of a program have the same offset from a vector.
        most = max(VECTOR, target.multiprocessors * tile.resident // VECTOR * VECTOR)
        known = {"rows": m, "tiles": tiles, "blocks": tiles * columns, "windows": min(most, m)}
        known |= {"columns": columns, "programs": programs}
        first, second = (*[known[word] for word in self.counts], 1)[:2]
        return first, second, 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """The launch of a pipeline in one direction.

    Attributes:
        steps: the kernels, in order.
        columns: a function from a tile and N to the number of programs that share the columns of a row.
        row_terms: pointers to one fp32 value per row, which the first step writes and the next step reads.
        waits: whether programs that share a row wait for one another. They exchange values through memory that is
            filled with -1 for each launch, and all have to run at once, which a cooperative launch guarantees.
    """

    steps: tuple[Step, ...]
    columns: Callable[[Tile, int], int] = lambda tile, n: 1
    row_terms: tuple[str, ...] = ()
    waits: bool = False

    def programs(self, tile: Tile, n: int, target: Target) -> int:
        """Return the most programs that share the rows, which depends on the GPU and N, never on M."""
        # Blocks of columns fill the device already, and each further program writes a row of partial sums.
        return max(1, target.multiprocessors * tile.resident // self.columns(tile, n))

    def exchange(self, tile: Tile, n: int, m: int) -> int:
        """Return the number of int64 values through which programs that wait exchange values: per row of each tile."""
        return -(-m // tile.rows) * tile.rows * self.columns(tile, n)


def _slices(tile: Tile, n: int) -> int:
    return -(-n // (tile.held * tile.block))


def column_blocks(tile: Tile, n: int) -> int:
    """Return the number of chunks of columns per row."""
    return -(-n // tile.block)


FORWARD: dict[Pipeline, Row] = {
    **dict.fromkeys((Pipeline.ROWS, Pipeline.ONE_PASS, Pipeline.TWO_PASS), Row(steps=(Step(counts=("tiles",)),))),
    Pipeline.SPREAD: Row(steps=(Step(counts=("columns", "programs")),), columns=_slices, waits=True),
}

# Values of a tile of y that is quantised along columns, one block of rows. The interpreter takes as long for a narrow
# program as for a wide program.
_COLUMN_VALUES, _INTERPRETED_COLUMN_VALUES = 4096, 131072
# Rows a warp, by whether a tile is of dx, which has groups of a row too, or of LayerNorm's y. 16384x4096 on an H200,
# us of both kernels: RMSNorm's y in fp8 116 with 4 warps, 121 with 2; in MXFP8 115 with 1, 119 with 2, 162 with
# 4; LayerNorm's 139 with 1, 133 with 2. dx in fp8 214 with 4 warps, 223 with 8; in MXFP8 212 with 2, 218 with 1.
_ROWS_A_WARP, _MOST_COLUMN_WARPS = {False: 32, True: 16}, 4


_TERMS = ("pivot_ptr", "pivot_shift_ptr")

# The launches of the kernels that `anywhere` returns.
ANYWHERE = {
    part: Row(steps=(Step(counts=(count,), part=part),))
    for part, count in ((Part.WINDOW, "windows"), (Part.UNALIGNED, "rows"))
}

BACKWARD: dict[Pipeline, Row] = {
    **dict.fromkeys((Pipeline.ROWS, Pipeline.ONE_PASS), Row(steps=(Step(counts=("programs",)),))),
    Pipeline.TWO_PASS: Row(
        steps=(
            # A thread holds as many values of one row as of a tile of several rows.
            Step(counts=("rows",), part=Part.ROW_TERMS, tile=lambda tile: replace(tile, block=tile.rows * tile.block)),
            Step(counts=("columns", "programs")),
        ),
        columns=column_blocks,
        row_terms=("gh_mean_ptr", "g_mean_ptr"),
    ),
    Pipeline.SPREAD: Row(steps=(Step(counts=("columns", "programs")),), columns=column_blocks, waits=True),
}


def row_of(mode: Mode, pipeline: Pipeline, target: Target) -> Row:
    """Return the launch of a pipeline in the direction of a mode on a GPU."""
    row, parts = (BACKWARD if mode.is_backward else FORWARD)[pipeline], mode.column_parts
    if not parts:
        return row
    # Tiles of whole columns are as high as the highest block.
    rows, values = mode.group_size.code or 128, _COLUMN_VALUES if target.compiles else _INTERPRETED_COLUMN_VALUES
    # Both ways, groups of a row are in one program.
    block = max(values // rows, LONGEST_GROUP if mode.is_backward else 1)
    wide = mode.is_backward or mode.norm.centres
    own = Tile(Pipeline.ROWS, rows, block, min(rows // _ROWS_A_WARP[wide], _MOST_COLUMN_WARPS))
    steps = [Step(counts=("blocks",), part=part, tile=lambda _: own, columns=column_blocks) for part in parts]
    # The forward rows' kernel stores what the kernels of columns normalise by.
    return replace(row, steps=(*row.steps, *steps), row_terms=row.row_terms if mode.is_backward else _TERMS)


# To start in a wave and to write partial sums takes a program about as long as `_START` rows.
_MOST_WAVES = 4
_START = 4


def programs_a_part(most: int, parts: int, tiles: int) -> int:
    """Return the number of programs that share the tiles of a part.

    The programs that the GPU runs at once make a wave, and the run time depends on how many tiles the waves take one
    after another. One program more than fits into a wave costs another wave: with 17 programs for each of 32 samples on
    a GPU that runs 528, 16 programs wait until all other programs have ended.

    Args:
        most: programs that run at once.
        parts: the number of parts, which have as many tiles each.
        tiles: tiles per part.

    Returns:
        The smallest number for which waves take the fewest tiles one after another.
    """

    def taken(each: int) -> tuple[int, int]:
        return -(-parts * each // most) * (-(-tiles // each) + _START), each

    # The programs that fit into each number of waves, less the programs without which no program takes more tiles.
    most_of_each = [max(1, min(waves * most // parts, tiles)) for waves in range(1, _MOST_WAVES + 1)]
    return min((-(-tiles // -(-tiles // each)) for each in most_of_each), key=taken)


def compiler_options(tile: Tile, target: Target, *, waits: bool) -> dict[str, Any]:
    """Return the compiler's options: of programs that wait for one another, and the register limit for enough programs.

    Args:
        tile: the tile that the kernel runs with.
        target: the GPU that the kernel is for.
        waits: see `Row`.
    """
    if not target.compiles:
        return {}
    options: dict[str, Any] = {"launch_cooperative_grid": True} if waits else {}
    # Registers are allocated by eights. One program always fits; AMD's compiler counts otherwise and has no such limit.
    most = REGISTERS // (tile.resident * tile.warps * WARP) // 8 * 8
    capped = tile.resident > 1 and most <= _MOST_REGISTERS_A_THREAD and target.is_nvidia
    return {**options, "maxnreg": most} if capped else options


def constants(tile: Tile, n: int, alignment: int, misaligned: Collection[str], target: Target) -> dict[str, int]:
    """Return the compile-time constants that kernels may name: a tile's fields in capitals, and more from `signature`.

    Args:
        tile: the tile that the kernel runs with.
        n: the row length.
        alignment: the result of the function `row_alignment`.
        misaligned: pointers that are not multiples of 16 bytes.
        target: the GPU that the kernel is for.
    """
    numbers = {f.name.upper(): getattr(tile, f.name) for f in fields(Tile) if f.name not in ("pipeline", "warps")}
    return {
        "N": n,
        "ROW_ALIGNMENT": alignment,
        "VECTOR": VECTOR,
        "PAIRED": read_together(n, alignment, misaligned) > 1,
        "PTX": target.compiles and target.is_nvidia,
        "PDL": target.launches_early,
        **numbers,
    }


def read_together(n: int, alignment: int, misaligned: Collection[str]) -> int:
    """Return how many neighbours may be read at once, whatever the row; the arguments are those of `constants`."""
    return 1 if misaligned else row_alignment(n, alignment)


def choose(mode: Mode, tiles: Iterable[Tile], n: int, target: Target) -> Tile:
    """Return the first tile that a GPU can run: the GPU has to hold all programs that wait for one another.

    With plain launches, no program may wait.

    Raises:
        DeviceError: the GPU can run none of the tiles.
    """
    for tile in tiles:
        row = row_of(mode, tile.pipeline, target)
        if not row.waits:
            return tile
        waiting, held = row.columns(tile, n), target.held_at_once(tile.resident)
        if waiting <= held:
            return tile
    raise DeviceError(
        f"{mode.name} at N = {n} takes {waiting} programs that wait for one another, and {target.arch} "
        f"with {target.multiprocessors} multiprocessors holds {held} at once; give N = {n} another pipeline in the "
        "table of tiles: normforge tune"
    )


def refuse_variant(mode: AnyMode, tile: Tile, n: int, m: int) -> None:
    """Raise if the bits of a row would depend on the row's batch.

    Raises:
        InvarianceError: rows are spread over programs, or are more than a kernel that counts rows in i32 can count.
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


# The smallest copy to shared memory that hardware makes, in bytes.
_WORD = 4


def staged(tile: Tile, unstaged: Tile, n: int, itemsizes: Collection[int], together: int, target: Target) -> Tile:
    """Return a tile with as many stages as a GPU has room for in a backward launch, or a tile with rows in registers.

    Args:
        tile: the table's tile, for rows in x's dtype.
        unstaged: the tile for a GPU that cannot copy rows ahead to shared memory; a staged tile leaves no registers for
            a row.
        n: the row length.
        itemsizes: bytes per element of each tensor whose rows are read.
        together: how many neighbours may be read at once.
        target: the GPU.
    """
    if tile.stages == 1:
        return tile
    in_words = together * min(itemsizes) >= _WORD
    columns = column_blocks(tile, n) * tile.block
    most = most_stages(target.arch, tile.resident, columns * sum(itemsizes)) if in_words and target.compiles else 1
    return replace(tile, stages=min(tile.stages, most)) if most > 1 else unstaged


# Rows that start anywhere are held in registers up to this length, even where aligned rows are read twice.
_LONGEST_WINDOW = 7168


def anywhere(
    mode: Mode, tile: Tile, n: int, strides: Mapping[str, RowStride], misaligned: Collection[str], *, few: bool
) -> tuple[Part, Tile] | None:
    """Return the kernel for rows that start anywhere, with its tile; None if the tile's own kernel is faster.

    The tile's own kernel reads neighbours together. In bf16 on an H200, 2048 rows of 13,084 columns take 40 us with it
    and 54 us with `unaligned`; with an add 67 and 76. Of 13,082 columns, 81 and 76; of 13,081 columns, 121 and 77.

    Args:
        mode: the mode of the call.
        tile: the tile for aligned rows.
        n: the row length.
        strides: the row strides of all tensors, by their pointers; they have to be equal.
        misaligned: pointers that are not multiples of 16 bytes.
        few: whether the table calls the rows few.
    """
    is_one = isinstance(strides["x_ptr"], int) and len(set(strides.values())) == 1
    if not is_one or not strides.keys().isdisjoint(misaligned):
        return None
    pipeline, alignment = tile.pipeline, row_alignment(strides["x_ptr"])
    if mode.has_window and (pipeline is Pipeline.ONE_PASS or (pipeline is Pipeline.TWO_PASS and n <= _LONGEST_WINDOW)):
        return (Part.WINDOW, window_tile(mode, tile, n, few)) if alignment < VECTOR else None
    together = 2 if pipeline is Pipeline.TWO_PASS and not mode.streams else 1
    is_read_twice = mode.has_unaligned and pipeline in (Pipeline.TWO_PASS, Pipeline.SPREAD)
    return (Part.UNALIGNED, unaligned_tile(n)) if is_read_twice and alignment <= together else None
