"""The parameters of every kernel, in order, as one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .groups import AnyMode, GroupMode
from .model import Mode
from .values import Part, Pipeline


@dataclass(frozen=True)
class Param:
    """A kernel parameter: its declaration and the trailing comment that documents it."""

    declaration: str
    comment: str


@dataclass(frozen=True)
class _Row:
    declaration: str
    comment: str
    # Takes a `Mode` or a `GroupMode`.
    wanted: Callable[[Any, Pipeline | Part], bool] = lambda mode, pipeline: True


_ALIGNMENT = _Row("ROW_ALIGNMENT: tl.constexpr", "elements; every row stride is a multiple of it")
_PAIRED = _Row("PAIRED: tl.constexpr", "whether 16-bit values may be read in pairs", lambda m, p: p is Pipeline.SPREAD)
_PTX = _Row(
    "PTX: tl.constexpr",
    "whether the target runs PTX",
    lambda m, p: p in (Pipeline.SPREAD, Part.WINDOW) or m.reduce.exchanges,
)
_STAGES = _Row(
    "STAGES: tl.constexpr", "of the loop over rows; more than 1 go by shared memory", lambda m, p: p is Pipeline.SPREAD
)
# A cooperative launch must find room for all of its programs at once, so it cannot start early.
_PDL = _Row(
    "PDL: tl.constexpr", "whether it is launched before the one ahead has ended", lambda m, p: p is not Pipeline.SPREAD
)


def _counts_rows(mode: Mode, part: Pipeline | Part) -> bool:
    """Return True if a forward kernel takes the number of rows."""
    shares = mode.reduce.scatters or mode.reduce.gathers
    return shares or part in (Pipeline.ROWS, Pipeline.SPREAD, Part.WINDOW) or (mode.save_mv and mode.fadd.renorms)


def _writes_y(mode: Mode) -> bool:
    """Return True if a forward kernel writes y, and reads the vectors that y follows from."""
    return not mode.statistics_only


def _stores_rows(mode: Mode) -> bool:
    """Return True if a forward kernel stores the statistics of the rows that y is of, in tensors of their own."""
    return mode.stores_statistics and not (mode.save_mv and mode.fadd.renorms)


_MODULATION = (
    _Row("scale_ptr", "a row for each of x's, some of them the same", lambda m, p: m.modulated),
    _Row("shift_ptr", "a row for each of x's, some of them the same", lambda m, p: m.modulated),
)
_MODULATION_STRIDES = (
    _Row("scale_row_stride", "elements", lambda m, p: m.modulated),
    _Row("shift_row_stride", "elements", lambda m, p: m.modulated),
)

_NEXT = (
    _Row("next_weight_ptr", "(N,) or None, of the second norm", lambda m, p: m.fadd.renorms),
    _Row("next_bias_ptr", "(N,) or None, of the second norm", lambda m, p: m.fadd.renorms and m.norm.centres),
)

# The kernel of columns subtracts both from a row.
_PIVOT = (
    _Row("pivot_ptr", "(M,) fp32", lambda m, p: m.columnwise.writes and m.norm.centres),
    _Row(
        "pivot_shift_ptr", "(M,) fp32, from the pivot to the mean", lambda m, p: m.columnwise.writes and m.norm.centres
    ),
)

_FORWARD = (
    _Row("x_ptr", "({rows_in}, N) {dtype_in}"),
    _Row("x_scale_ptr", "(M,) fp32, or one value", lambda m, p: m.dtype_in.is_fp8),
    _Row("x_bias_ptr", "(N,)", lambda m, p: m.x_bias),
    _Row("gate_ptr", "a row for each of x's, some of them the same", lambda m, p: m.x_gate),
    _Row("gate_ptr", "(M, N)", lambda m, p: m.gating.gates),
    _Row("dropout_rng_ptr", "(2,) int64, seed and offset", lambda m, p: m.dropout),
    _Row("residual_ptr", "({rows_kept}, N)", lambda m, p: m.fadd.adds),
    _Row("weight_ptr", "(N,) or None", lambda m, p: _writes_y(m) and not m.grouped),
    _Row("bias_ptr", "(N,) or None", lambda m, p: _writes_y(m) and m.norm.centres and not m.grouped),
    _Row("weight_ptr", "(groups, N) or None", lambda m, p: m.grouped),
    _Row("bias_ptr", "(groups, N) or None", lambda m, p: m.norm.centres and m.grouped),
    *_NEXT,
    *_MODULATION,
    _Row("smooth_scale_ptr", "(N,)", lambda m, p: m.fquant.smooths),
    _Row("static_scale_ptr", "(1,) fp32", lambda m, p: m.fquant.takes_scale),
    _Row("global_scale_ptr", "(1,) fp32", lambda m, p: m.scale_format.takes_global),
    _Row("column_scale_ptr", "(N,)", lambda m, p: m.fquant.takes_column_scales),
    _Row("scale_ub_ptr", "(1,) fp32", lambda m, p: m.scale_ub),
    _Row("y_ptr", "(M, N) {dtype_out}", lambda m, p: _writes_y(m) and m.dtype_out.packs == 1),
    _Row("y_ptr", "(M, N // 2), pairs of {dtype_out}", lambda m, p: m.dtype_out.packs > 1),
    _Row("residual_out_ptr", "({rows_kept}, N), may be residual_ptr", lambda m, p: m.fadd.stores),
    _Row("y_scale_ptr", "(M,) {scale_dtype}", lambda m, p: m.fquant.measures and not m.group_size.code),
    _Row("y_scale_ptr", "(M, groups) {scale_dtype}", lambda m, p: m.has_float_groups),
    _Row("y_scale_ptr", "(M, groups), {codes}", lambda m, p: m.scale_format.stores_bytes and m.has_scale_strides),
    _Row("y_scale_ptr", "tiles of 128 rows by 4 groups, {codes}", lambda m, p: m.scale_layout.swizzles),
    _Row("unquantised_ptr", "(M, N) {dtype_in}", lambda m, p: m.save_unquant),
    _Row("amax_ptr", "(1,) fp32, raised to the largest |y|", lambda m, p: m.save_amax),
    _Row("first_mean_ptr", "(M,) fp32, of the first norm", lambda m, p: m.stores_first and m.norm.centres),
    _Row("first_rstd_ptr", "(M,) fp32, of the first norm", lambda m, p: m.stores_first),
    _Row("mean_ptr", "(M,) fp32", lambda m, p: _stores_rows(m) and m.norm.centres),
    *_PIVOT,
    _Row("rstd_ptr", "(M,) fp32", lambda m, p: _stores_rows(m)),
    _Row(
        "rstd_ptr", "fp32, each norm's statistics; `statistics_length` apart", lambda m, p: m.save_mv and m.fadd.renorms
    ),
    _Row("exchange_ptr", "(M, slices) int64, -1", lambda m, p: p is Pipeline.SPREAD),
    _Row("exchange_ptr", "int64, of a rank: see peers.py", lambda m, p: m.reduce.exchanges),
    _Row("row_stride", "elements, of x and y", lambda m, p: p is Part.WINDOW),
    _Row("x_row_stride", "elements", lambda m, p: p is not Part.WINDOW),
    _Row("x_scale_stride", "1, or 0 where one value serves all rows", lambda m, p: m.dtype_in.is_fp8),
    _Row("gate_row_stride", "elements", lambda m, p: m.reads_gate),
    _Row("residual_row_stride", "elements", lambda m, p: m.fadd.adds),
    _Row("weight_row_stride", "elements, from group to group, and 0 from row to row", lambda m, p: m.grouped),
    _Row(
        "bias_row_stride",
        "elements, from group to group, and 0 from row to row",
        lambda m, p: m.grouped and m.norm.centres,
    ),
    *_MODULATION_STRIDES,
    _Row("y_row_stride", "elements", lambda m, p: _writes_y(m) and p is not Part.WINDOW),
    _Row("residual_out_row_stride", "elements", lambda m, p: m.fadd.stores),
    _Row("unquantised_row_stride", "elements", lambda m, p: m.save_unquant),
    _Row("M", "rows", _counts_rows),
    _Row("eps", "fp32"),
    _Row("weight_offset", "fp32, added to every weight", lambda m, p: _writes_y(m) and not m.norm.centres),
    _Row("dropout_p", "fp32, from 0 to below 1", lambda m, p: m.dropout),
    _Row("y_scale_row_stride", "{scale_elements}", lambda m, p: m.has_scale_strides),
    _Row("y_scale_group_stride", "{scale_elements}{of_four}", lambda m, p: m.has_scale_strides),
    _Row("N: tl.constexpr", "columns, exact"),
    _Row(_ALIGNMENT.declaration, _ALIGNMENT.comment, lambda m, p: p not in (Part.WINDOW, Part.UNALIGNED)),
    _Row("ROWS: tl.constexpr", "rows a program", lambda m, p: p is Pipeline.ROWS),
    _Row("BLOCK: tl.constexpr", "columns a chunk"),
    _Row("HELD: tl.constexpr", "chunks of the row to keep", lambda m, p: p is Pipeline.TWO_PASS and m.streams),
    _Row("HELD: tl.constexpr", "chunks a program", lambda m, p: p is Pipeline.SPREAD),
    _STAGES,
    _Row("PEERS: tl.constexpr", "programs a row, up to a power of two", lambda m, p: p is Pipeline.SPREAD),
    _PAIRED,
    _Row("RANKS: tl.constexpr", "of the exchange", lambda m, p: m.reduce.exchanges),
    _PTX,
    _Row(
        "VECTOR: tl.constexpr",
        "elements that a thread is to move at once",
        lambda m, p: p in (Part.WINDOW, Part.UNALIGNED),
    ),
    _PDL,
)


def _reads_x(mode: Mode, part: Pipeline | Part) -> bool:
    """Return True if the kernel of columns takes x: to normalise x, or to round to the dtype of x."""
    return not mode.fadd.stores or mode.cast.comes_first or mode.quantise_rounded


_COLUMNWISE = (
    _Row("columnwise_ptr", "(M, N) {dtype_out}", lambda m, p: not m.columnwise.transposes),
    _Row("columnwise_ptr", "(N, M) {dtype_out}", lambda m, p: m.columnwise.transposes),
    _Row("columnwise_scale_ptr", "fp32, per block of rows and column", lambda m, p: m.has_float_groups),
    _Row("columnwise_scale_ptr", "exponents, per block of rows and column", lambda m, p: m.scale_format.stores_bytes),
    _Row("columnwise_scale_ptr", "(2, N) fp32, scales and the bits of amax", lambda m, p: not m.group_size.code),
)
_COLUMNWISE_STRIDES = (
    _Row("columnwise_vectors", "of 16 bytes, from column to column", lambda m, p: m.columnwise.transposes),
    _Row("columnwise_scale_column_stride", "{scale_elements}", lambda m, p: m.has_scale_strides),
    _Row("columnwise_scale_block_stride", "{scale_elements}{of_four}", lambda m, p: m.has_scale_strides),
    _Row("N: tl.constexpr", "columns, exact"),
    _ALIGNMENT,
    _Row("ROWS: tl.constexpr", "rows a program"),
    _Row("BLOCK: tl.constexpr", "columns a program"),
    _PDL,
)

_COLUMNS = (
    _Row("x_ptr", "(M, N) {dtype_in}", _reads_x),
    _Row("residual_out_ptr", "(M, N), the rows to normalise", lambda m, p: m.fadd.stores),
    _Row("residual_ptr", "(M, N)", lambda m, p: m.fadd.is_after),
    _Row("weight_ptr", "(N,) or None", lambda m, p: not m.fadd.renorms),
    _Row("bias_ptr", "(N,) or None", lambda m, p: m.norm.centres and not m.fadd.renorms),
    *_NEXT,
    *_MODULATION,
    *_PIVOT,
    _Row("rstd_ptr", "(M,) fp32"),
    _Row("y_ptr", "(M, N) {dtype_out}, which says what rows are rounded to", lambda m, p: m.cast.comes_first),
    *_COLUMNWISE,
    _Row("x_row_stride", "elements", lambda m, p: not m.fadd.stores),
    _Row("residual_out_row_stride", "elements", lambda m, p: m.fadd.stores),
    _Row("residual_row_stride", "elements", lambda m, p: m.fadd.is_after),
    *_MODULATION_STRIDES,
    _Row("M", "rows"),
    _Row("weight_offset", "fp32, added to every weight", lambda m, p: not m.norm.centres),
    *_COLUMNWISE_STRIDES,
)
# The kernel that finds the amax of whole columns writes no columns.
_COLUMN_AMAX = tuple(row for row in _COLUMNS if row.declaration not in ("columnwise_ptr", "columnwise_vectors"))

_BOTH_WAYS = (
    _Row("dx_ptr", "(M, N), the rows to quantise"),
    _Row("rowwise_ptr", "(M, N) {dtype_out}"),
    _Row("rowwise_scale_ptr", "fp32 or exponents, per row and group"),
    *_COLUMNWISE,
    _Row("dx_row_stride", "elements"),
    _Row("M", "rows"),
    _Row("rowwise_scale_row_stride", "{scale_elements}", lambda m, p: m.has_scale_strides),
    _Row("rowwise_scale_group_stride", "{scale_elements}{of_four}", lambda m, p: m.has_scale_strides),
    *_COLUMNWISE_STRIDES,
)


_BACKWARD = (
    _Row("dy_ptr", "(M, N)", lambda m, p: not m.dy_format.is_fp8),
    _Row("dy_ptr", "(M, N) {dtype_dy}", lambda m, p: m.dy_format.is_fp8),
    _Row("dy_scale_ptr", "of rows or their groups, fp32 or exponents, or one value", lambda m, p: m.dy_format.is_fp8),
    _Row("x_ptr", "(M, N) {dtype_in}"),
    _Row("x_bias_ptr", "(N,)", lambda m, p: m.x_bias),
    _Row("weight_ptr", "(N,) or None", lambda m, p: not m.grouped),
    _Row("weight_ptr", "(groups, N) or None", lambda m, p: m.grouped),
    _Row("bias_ptr", "like weight_ptr", lambda m, p: m.gating.is_after and m.norm.centres and p is not Part.ROW_TERMS),
    _Row("scale_ptr", "(samples, N)", lambda m, p: m.modulated),
    _Row("gate_ptr", "(samples, N)", lambda m, p: m.x_gate and p is not Part.ROW_TERMS),
    _Row("gate_ptr", "(M, N)", lambda m, p: m.gating.gates),
    _Row("gated_ptr", "(M, N), what was gated", lambda m, p: m.x_gate and p is not Part.ROW_TERMS),
    _Row("dropout_rng_ptr", "(2,) int64, seed and offset", lambda m, p: m.dropout and p is not Part.ROW_TERMS),
    _Row("mean_ptr", "(M,) fp32", lambda m, p: m.norm.centres),
    _Row("rstd_ptr", "(M,) fp32"),
    _Row("gh_mean_ptr", "(M,) fp32, the mean of g * h", lambda m, p: p in (Pipeline.TWO_PASS, Part.ROW_TERMS)),
    _Row("g_mean_ptr", "(M,) fp32", lambda m, p: p in (Pipeline.TWO_PASS, Part.ROW_TERMS) and m.norm.centres),
    _Row("exchange_ptr", "(tiles, slices, ROWS) int64, -1", lambda m, p: p is Pipeline.SPREAD),
    _Row("dresidual_out_ptr", "(M, N)", lambda m, p: m.fadd.stores and p is not Part.ROW_TERMS),
    _Row("dx_ptr", "(M, N) or None", lambda m, p: p is not Part.ROW_TERMS),
    _Row("dgated_ptr", "(M, N) or None", lambda m, p: m.x_gate and p is not Part.ROW_TERMS),
    _Row("dgate_ptr", "(M, N) or None", lambda m, p: m.gating.gates and p is not Part.ROW_TERMS),
    _Row("ddropped_ptr", "(M, N) or None", lambda m, p: m.dropout and p is not Part.ROW_TERMS),
    _Row("dweight_ptr", "(programs, N) fp32 or None", lambda m, p: p is not Part.ROW_TERMS),
    _Row(
        "dbias_ptr",
        "(programs, N) fp32 or None",
        lambda m, p: (m.norm.centres or m.modulated) and p is not Part.ROW_TERMS,
    ),
    _Row("dgate_ptr", "(programs, N) fp32 or None", lambda m, p: m.x_gate and p is not Part.ROW_TERMS),
    _Row("dx_bias_ptr", "(programs, N) fp32 or None", lambda m, p: m.x_bias and p is not Part.ROW_TERMS),
    _Row("dy_row_stride", "elements"),
    _Row("dy_scale_stride", "scales per row, or 0 where one value serves all rows", lambda m, p: m.dy_format.is_fp8),
    _Row("x_row_stride", "elements"),
    _Row("scale_row_stride", "elements", lambda m, p: m.modulated),
    _Row("gate_row_stride", "elements", lambda m, p: m.gating.gates or (m.x_gate and p is not Part.ROW_TERMS)),
    _Row("gated_row_stride", "elements", lambda m, p: m.x_gate and p is not Part.ROW_TERMS),
    _Row("dresidual_out_row_stride", "elements", lambda m, p: m.fadd.stores and p is not Part.ROW_TERMS),
    _Row("dx_row_stride", "elements", lambda m, p: p is not Part.ROW_TERMS),
    _Row("dgated_row_stride", "elements", lambda m, p: m.x_gate and p is not Part.ROW_TERMS),
    _Row("dgate_row_stride", "elements", lambda m, p: m.gating.gates and p is not Part.ROW_TERMS),
    _Row("ddropped_row_stride", "elements", lambda m, p: m.dropout and p is not Part.ROW_TERMS),
    _Row("M", "rows", lambda m, p: p is not Part.ROW_TERMS),
    _Row("sample_rows", "rows of each sample", lambda m, p: m.modulated),
    _Row("groups", "of N columns side by side, each a row of M", lambda m, p: m.grouped),
    _Row("weight_offset", "fp32, added to every weight", lambda m, p: not m.norm.centres),
    _Row("dropout_p", "fp32, from 0 to below 1", lambda m, p: m.dropout and p is not Part.ROW_TERMS),
    _Row("N: tl.constexpr", "columns, exact"),
    _ALIGNMENT,
    _Row("ROWS: tl.constexpr", "rows at a time", lambda m, p: p not in (Pipeline.ONE_PASS, Part.ROW_TERMS)),
    _Row("BLOCK: tl.constexpr", "columns a chunk"),
    _Row(_STAGES.declaration, _STAGES.comment, lambda m, p: p is Pipeline.ONE_PASS),
    _Row("PEERS: tl.constexpr", "programs a row, up to a power of two", lambda m, p: p is Pipeline.SPREAD),
    _Row(_PAIRED.declaration, _PAIRED.comment, lambda m, p: p in (Pipeline.ONE_PASS, Pipeline.SPREAD)),
    _Row(_PTX.declaration, _PTX.comment, lambda m, p: p is Pipeline.ONE_PASS),
    _PDL,
)


# Parameters of GroupNorm's kernels.


def _reads(mode: GroupMode, part: Pipeline | Part) -> bool:
    return part is not Part.MERGE


def _merges(mode: GroupMode, part: Pipeline | Part) -> bool:
    return part is (Part.MERGE if mode.channels_last else Pipeline.TWO_PASS)


def _holds(mode: GroupMode, part: Pipeline | Part) -> bool:
    return part is Pipeline.ONE_PASS


def _in_parts(mode: GroupMode, part: Pipeline | Part) -> bool:
    return part is not Pipeline.ONE_PASS


def _sweeps(mode: GroupMode, part: Pipeline | Part) -> bool:
    return _reads(mode, part) and _in_parts(mode, part)


def _writes(mode: GroupMode, part: Pipeline | Part) -> bool:
    return isinstance(part, Pipeline)


def _finds_statistics(mode: GroupMode, part: Pipeline | Part) -> bool:
    return _writes(mode, part) or _merges(mode, part)


def _finds_sums(mode: GroupMode, part: Pipeline | Part) -> bool:
    return mode.is_backward and _sweeps(mode, part)


def _sums_channels(mode: GroupMode, part: Pipeline | Part) -> bool:
    return _finds_sums(mode, part) or _holds(mode, part)


def _activates(mode: GroupMode, part: Pipeline | Part) -> bool:
    return mode.activation.is_applied and part not in (Part.MOMENTS, Part.MERGE)


_GROUP_SHAPE = (
    _Row("units", "positions of a channel / ALIGNMENT", _sweeps),
    _Row("first_item", "of this launch"),
    _Row("part_tiles", "tiles a part, a multiple of HELD", _sweeps),
    _Row("parts", "of each sample", lambda m, p: p is Part.MERGE),
)
_GROUP_CONSTANTS = (
    _Row("C: tl.constexpr", "channels"),
    _Row("CHANNELS: tl.constexpr", "of a group"),
    _Row("WIDTH: tl.constexpr", "channels of a program", _reads),
    _Row("BLOCK_C: tl.constexpr", "channels a tile", _reads),
    _Row("BLOCK_S: tl.constexpr", "positions per tile", _reads),
    _Row("POSITIONS: tl.constexpr", "of a channel", _holds),
    _Row("HELD: tl.constexpr", "tiles in registers", _reads),
    _Row("ALIGNMENT: tl.constexpr", "divides the positions", _reads),
    _Row("FULL: tl.constexpr", "whether runs have no tile, and tiles no position, beyond the last", _reads),
    _Row("ALIKE: tl.constexpr", "whether the tiles of a run have the same channels", _finds_sums),
    _Row("ALONE: tl.constexpr", "whether a program has whole groups", lambda m, p: p is Pipeline.TWO_PASS),
    _Row("PEERS: tl.constexpr", "parts to merge at a time, a power of two", _merges),
    _Row("PTX: tl.constexpr", "whether the target runs PTX", lambda m, p: _holds(m, p) or _activates(m, p)),
    _PDL,
)

_GROUP_FORWARD = (
    _Row("x_ptr", "{rows} {dtype_in}", _reads),
    _Row("weight_ptr", "(C,) or None", _writes),
    _Row("bias_ptr", "(C,) or None", _writes),
    _Row("partials_ptr", "(groups, 4, parts) fp32", lambda m, p: _in_parts(m, p) and not m.channels_last),
    _Row("partials_ptr", "(samples, parts, 4, C) fp32", lambda m, p: _in_parts(m, p) and m.channels_last),
    _Row("y_ptr", "x's shape", _writes),
    _Row("mean_ptr", "(groups,) fp32 or None", _finds_statistics),
    _Row("rstd_ptr", "(groups,) fp32 or None", _finds_statistics),
    *_GROUP_SHAPE,
    _Row("eps", "fp32", _finds_statistics),
    *_GROUP_CONSTANTS,
)

_GROUP_BACKWARD = (
    _Row("dy_ptr", "x's shape", _reads),
    _Row("x_ptr", "{rows} {dtype_in}", _reads),
    _Row("weight_ptr", "(C,) or None", _reads),
    _Row("bias_ptr", "(C,) or None", _activates),
    _Row("mean_ptr", "(groups,) fp32", _reads),
    _Row("rstd_ptr", "(groups,) fp32", _reads),
    _Row("partials_ptr", "(groups, 2, parts) fp32", lambda m, p: _in_parts(m, p) and not m.channels_last),
    _Row("partials_ptr", "(samples, parts, 2, C) fp32", lambda m, p: _in_parts(m, p) and m.channels_last),
    _Row("dx_ptr", "x's shape", _writes),
    _Row("dweight_ptr", "(sums, C) fp32 or None", _sums_channels),
    _Row("dbias_ptr", "(sums, C) fp32 or None", _sums_channels),
    *_GROUP_SHAPE,
    *_GROUP_CONSTANTS,
)


# Parameters of the kernels of norms over channels.

_CHANNEL_CONSTANTS = (
    _Row("units", "positions of a channel / ALIGNMENT"),
    _Row("items", "tiles of positions, in all samples", lambda m, p: m.is_backward and p is not Part.ROW_TERMS),
    _Row("N: tl.constexpr", "channels, exact"),
    _Row("ROWS: tl.constexpr", "positions per tile"),
    _Row("BLOCK: tl.constexpr", "channels per chunk"),
    _Row("ALIGNMENT: tl.constexpr", "divides the positions"),
    _Row("PTX: tl.constexpr", "whether the target runs PTX", _activates),
    _PDL,
)

_CHANNEL_FORWARD = (
    _Row("x_ptr", "{rows} {dtype_in}"),
    _Row("weight_ptr", "(N,) or None"),
    _Row("bias_ptr", "(N,) or None", lambda m, p: m.span.centres),
    _Row("y_ptr", "x's shape"),
    _Row("mean_ptr", "(B, S) fp32 or None"),
    _Row("rstd_ptr", "(B, S) fp32 or None"),
    _Row("eps", "fp32"),
    *_CHANNEL_CONSTANTS,
)

_CHANNEL_BACKWARD = (
    _Row("dy_ptr", "x's shape"),
    _Row("x_ptr", "{rows} {dtype_in}"),
    _Row("weight_ptr", "(N,) or None"),
    _Row("bias_ptr", "(N,) or None", lambda m, p: m.activation.is_applied and m.span.centres),
    _Row("mean_ptr", "(B, S) fp32", lambda m, p: m.span.centres),
    _Row("rstd_ptr", "(B, S) fp32"),
    _Row("gh_mean_ptr", "(B, S) fp32, the mean of g * h", lambda m, p: p is not Pipeline.ONE_PASS),
    _Row("g_mean_ptr", "(B, S) fp32", lambda m, p: m.span.centres and p is not Pipeline.ONE_PASS),
    _Row("dx_ptr", "x's shape", lambda m, p: p is not Part.ROW_TERMS),
    _Row("dweight_ptr", "(programs, N) fp32 or None", lambda m, p: p is not Part.ROW_TERMS),
    _Row("dbias_ptr", "(programs, N) fp32 or None", lambda m, p: m.span.centres and p is not Part.ROW_TERMS),
    *_CHANNEL_CONSTANTS,
)


_COLUMN_TABLES: dict[Pipeline | Part, tuple[_Row, ...]] = {
    Part.COLUMN_AMAX: _COLUMN_AMAX,
    Part.COLUMNS: _COLUMNS,
    Part.BOTH_WAYS: _BOTH_WAYS,
}


def params(mode: Mode, part: Pipeline | Part) -> list[Param]:
    """Return the parameters of a kernel, which the runtime matches by name."""
    table = _COLUMN_TABLES.get(part, _BACKWARD if mode.is_backward else _FORWARD)
    return _listed(table, mode, part, _words(mode))


def group_params(mode: GroupMode, part: Pipeline | Part) -> list[Param]:
    """Return the parameters of a GroupNorm kernel, as `params` does."""
    order = "S, {}" if mode.channels_last else "{}, S"
    words = {"dtype_in": mode.dtype_in.value, "rows": f"(B, {order.format('C' if mode.span.is_group else 'N')})"}
    return _listed(_GROUP_TABLES[mode.span.is_group, mode.is_backward], mode, part, words)


# By whether groups share statistics, and whether the kernel computes gradients.
_GROUP_TABLES = {
    (True, False): _GROUP_FORWARD,
    (True, True): _GROUP_BACKWARD,
    (False, False): _CHANNEL_FORWARD,
    (False, True): _CHANNEL_BACKWARD,
}


def _listed(table: tuple[_Row, ...], mode: AnyMode, part: Pipeline | Part, words: dict[str, str]) -> list[Param]:
    return [Param(row.declaration, row.comment.format(**words)) for row in table if row.wanted(mode, part)]


def _words(mode: Mode) -> dict[str, str]:
    """Return the replacements of the words in braces in comments."""
    return {
        "rows_in": "RANKS * M" if mode.reduce.scatters else "M // RANKS" if mode.reduce.gathers else "M",
        "rows_kept": "M // RANKS" if mode.reduce.gathers else "M",
        "dtype_in": mode.dtype_in.value,
        "dtype_out": mode.dtype_out.value,
        "dtype_dy": mode.dy_format.dtype.value,
        "scale_dtype": mode.scale_dtype.value,
        "codes": "e4m3" if mode.scale_format.takes_global else "exponents",
        "scale_elements": "bytes" if mode.scale_format.stores_bytes else "elements",
        "of_four": ", of four groups" if mode.scale_format.packs > 1 else "",
    }


@dataclass(frozen=True)
class Pointed:
    """A tensor that a forward kernel points at its row, or at the row's first column.

    Attributes:
        name: the tensor's name.
        offset: the device function that finds the row.
        is_optional: whether the tensor may be None.
    """

    name: str
    offset: str
    is_optional: bool


def row_tensors(mode: Mode, part: Pipeline | Part) -> list[Pointed]:
    """Return the tensors whose rows a forward kernel points at: all with a row stride except scales."""
    comments = {param.declaration: param.comment for param in params(mode, part)}
    names = [name.removesuffix("_row_stride") for name in comments if name.endswith("_row_stride")]
    return [
        Pointed(
            name,
            "pair_offset" if name == "y" and mode.dtype_out.packs > 1 else "row_offset",
            comments[f"{name}_ptr"].endswith("or None"),
        )
        for name in names
        if name != "y_scale"
    ]


def vectors(mode: Mode, part: Pipeline | Part) -> list[Pointed]:
    """Return the tensors of one value per column that a forward kernel takes."""
    return [
        Pointed(param.declaration.removesuffix("_ptr"), "", param.comment.endswith("or None"))
        for param in params(mode, part)
        if param.comment.startswith("(N,)")
    ]


_BACKWARD_SUMMARIES: dict[Pipeline | Part, str] = {
    Pipeline.ROWS: "Tiles of several rows in turn.",
    Pipeline.ONE_PASS: "Rows in turn, each held in registers.",
    Part.ROW_TERMS: "The means along one row that its gradients need.",
    Pipeline.TWO_PASS: "A block of columns, tiles of several rows in turn.",
    Pipeline.SPREAD: "Some columns of tiles of several rows, whose means the programs of a team exchange.",
    Part.BOTH_WAYS: "Blocks of dx, quantised by row and by column.",
}


# For GroupNorm, by whether the kernel computes gradients.
_GROUP_SUMMARIES: dict[tuple[bool, Pipeline | Part], str] = {
    (False, Pipeline.ONE_PASS): "Whole groups, held in registers.",
    (False, Part.MOMENTS): "The moments of a part of each bundle.",
    (False, Part.MERGE): "The moments of a group, from those of all its parts.",
    (False, Pipeline.TWO_PASS): "A part of a group, from the moments of the group.",
    (True, Pipeline.ONE_PASS): "Whole groups, held in registers.",
    (True, Part.TERMS): "What a part of each bundle adds to the sums that its gradients need.",
    (True, Part.MERGE): "The means of a group, from the sums of all its parts.",
    (True, Pipeline.TWO_PASS): "A part of a group, from the means of the group.",
}


# For norms over channels, by whether the kernel computes gradients.
_CHANNEL_SUMMARIES: dict[tuple[bool, Pipeline | Part], str] = {
    (False, Pipeline.ONE_PASS): "A tile of positions, with all their channels in registers.",
    (False, Pipeline.TWO_PASS): "A tile of positions, whose channels are read again.",
    (True, Pipeline.ONE_PASS): "Tiles of positions in turn, with all their channels in registers.",
    (True, Part.ROW_TERMS): "The means along channels that the gradients of a tile of positions need.",
    (True, Pipeline.TWO_PASS): "A block of channels, tiles of positions in turn.",
}


def group_summary(mode: GroupMode, part: Pipeline | Part) -> str:
    """Return the docstring of a GroupNorm kernel, or of a norm over channels."""
    return (_GROUP_SUMMARIES if mode.span.is_group else _CHANNEL_SUMMARIES)[mode.is_backward, part]


def summary(mode: Mode, part: Pipeline | Part) -> str:
    """Return the docstring of a kernel."""
    if mode.is_backward:
        return _BACKWARD_SUMMARIES[part]
    if part is Part.COLUMN_AMAX:
        return "The amax of each column, from the statistics of each row."
    if part is Part.COLUMNS:
        return "Blocks of rows, quantised by column, from the statistics of each row."
    if part is Part.WINDOW:
        return "Rows in turn, each held in registers, where rows start anywhere."
    if part is Part.UNALIGNED:
        return "One row a program, chunk by chunk, where rows start anywhere."
    if mode.statistics_only and (part is Pipeline.TWO_PASS or (part is Pipeline.ONE_PASS and not mode.keeps_row)):
        return "One row a program, chunk by chunk."
    assert isinstance(part, Pipeline)
    return f"{part.summary[0].upper()}{part.summary[1:]}."


def column_sums(mode: Mode) -> list[tuple[str, str]]:
    """Return the gradients that a backward kernel sums over rows: name, and a row's contribution."""
    sums = [("dweight", f"dy * {'rounded_first(h, dy_ptr, x_ptr)' if mode.cast.comes_first else 'h'}")]
    if mode.norm.centres or mode.modulated:
        sums.append(("dbias", "dy"))
    if mode.x_bias:
        sums.append(("dx_bias", "ddropped" if mode.dropout else "dx"))
    if mode.x_gate:
        sums.append(("dgate", "dx * gated"))
    return sums
