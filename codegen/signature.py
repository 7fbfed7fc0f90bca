"""The parameters of every kernel, in order, as one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .model import Mode, Pipeline


@dataclass(frozen=True)
class Param:
    """A kernel parameter: its name as declared and the trailing comment that documents it."""

    declaration: str
    comment: str


@dataclass(frozen=True)
class _Row:
    declaration: str
    comment: str
    wanted: Callable[[Mode, Pipeline], bool] = lambda mode, pipeline: True


_TABLE = (
    _Row("x_ptr", "(M, N) {dtype_in}"),
    _Row("x_bias_ptr", "(N,)", lambda m, p: m.x_bias),
    _Row("residual_ptr", "(M, N)", lambda m, p: m.fadd.adds),
    _Row("weight_ptr", "(N,) or None"),
    _Row("bias_ptr", "(N,) or None", lambda m, p: m.norm.centres),
    _Row("smooth_scale_ptr", "(N,)", lambda m, p: m.fquant.smooths),
    _Row("y_ptr", "(M, N) {dtype_out}"),
    _Row("residual_out_ptr", "(M, N), may be residual_ptr", lambda m, p: m.fadd.stores),
    _Row("y_scale_ptr", "(M,) {scale_dtype}", lambda m, p: m.fquant.quantises),
    _Row("mean_ptr", "(M,) fp32", lambda m, p: m.save_mv and m.norm.centres),
    _Row("rstd_ptr", "(M,) fp32", lambda m, p: m.save_mv),
    _Row("x_row_stride", "elements"),
    _Row("residual_row_stride", "elements", lambda m, p: m.fadd.adds),
    _Row("y_row_stride", "elements"),
    _Row("residual_out_row_stride", "elements", lambda m, p: m.fadd.stores),
    _Row("M", "rows", lambda m, p: p is Pipeline.ROWS),
    _Row("eps", "fp32"),
    _Row("weight_offset", "fp32, added to every weight", lambda m, p: not m.norm.centres),
    _Row("N: tl.constexpr", "columns, exact"),
    _Row("ROWS: tl.constexpr", "rows a program", lambda m, p: p is Pipeline.ROWS),
    _Row("BLOCK: tl.constexpr", "columns a chunk"),
)


def params(mode: Mode, pipeline: Pipeline) -> list[Param]:
    """The parameters of one kernel; the runtime matches them by name."""
    words = {
        "dtype_in": mode.dtype_in.value,
        "dtype_out": mode.dtype_out.value,
        "scale_dtype": mode.scale_dtype.value,
    }
    return [Param(row.declaration, row.comment.format(**words)) for row in _TABLE if row.wanted(mode, pipeline)]
