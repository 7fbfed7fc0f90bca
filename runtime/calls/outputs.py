"""Results of calls, and the rows' statistics in one tensor, as autograd saves them: one allocation, not two.

Kernels are compiled for pointers at multiples of 16 bytes, so that is where each of the two starts, whatever M is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch

from ..codegen.families import Kind
from ..codegen.model import Mode
from ..codegen.values import ScaleLayout
from ..kernels.gpu import ALIGNMENT
from .check import Call

# From a shape and a dtype to a tensor.
Make = Callable[..., torch.Tensor]

_ITEMSIZE = 4
_STEP = ALIGNMENT // _ITEMSIZE


class LayerNormOutput(NamedTuple):
    """Outputs of a forward call; None where one was not asked for.

    Attributes:
        y: x's shape, in out_dtype.
        residual_out: x's shape, in residual's dtype: x + x_bias + residual, rounded once.
        y_scale: x's shape without the last dimension, in scale_dtype; y * y_scale undoes the quantisation.
        mean: x's shape without the last dimension, fp32; LayerNorm only.
        rstd: x's shape without the last dimension, fp32.
    """

    y: torch.Tensor
    residual_out: torch.Tensor | None
    y_scale: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor | None


class QuantisedOutput(NamedTuple):
    """Outputs of `quantised_layer_norm` and `quantised_rms_norm`; None where one was not asked for.

    Attributes:
        y: x's shape, in out_dtype; of fp4, whose elements lie two in one of torch's, (..., N / 2).
        residual_out: x's shape, in residual's dtype: x + x_bias + residual, rounded once.
        y_scale: x's shape without the last dimension; of groups with one of G = ceil(N / group_size) in its place, or,
            packed, of ceil(G / 4); swizzled, of two dimensions, x's rows in multiples of 128 and G in multiples of 4.
            None with a scale that was given.
        unquantised: x's shape, in x's dtype: y as it is before smooth_scale.
    """

    y: torch.Tensor
    residual_out: torch.Tensor | None
    y_scale: torch.Tensor | None
    unquantised: torch.Tensor | None


class ColumnwiseOutput(NamedTuple):
    """Outputs of a quantised norm that was asked for y along columns, or for an amax; None where one was not asked for.

    Attributes:
        y, residual_out, y_scale, unquantised: as `QuantisedOutput` has them.
        columnwise: y quantised in blocks of B = ceil(M / group_size) for each column, of M rows in all, and B = 1
            without groups: x's shape, or transposed (N, M), of which each row starts at a multiple of 16 bytes.
        columnwise_scale: (B, N), or with a transposed output (N, B); packed, four blocks in one; swizzled as y_scale of
            the transposed output.
        amax: the tensor that was passed as amax_out.
        mean: x's shape without the last dimension, fp32; LayerNorm only, with columns or unquantised.
        rstd: like mean, of LayerNorm and RMSNorm: what `layernorm2d_bwd` and `rmsnorm2d_bwd` take.
        first_mean, first_rstd: with fadd "post_add_norm", those of the norm before the add; mean and rstd are those of
            the norm behind it.
    """

    y: torch.Tensor
    residual_out: torch.Tensor | None
    y_scale: torch.Tensor | None
    unquantised: torch.Tensor | None
    columnwise: torch.Tensor | None
    columnwise_scale: torch.Tensor | None
    amax: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor | None
    first_mean: torch.Tensor | None = None
    first_rstd: torch.Tensor | None = None


class NormGradients(NamedTuple):
    """Gradients of a backward call; None where one was not asked for.

    Attributes:
        dx: x's shape, of what was normalised; also the gradient of a residual that was added to x.
        dweight: (N,), in weight's dtype.
        dbias: (N,); LayerNorm only.
        dx_bias: (N,), in x_bias's dtype.
        ddropped: x's shape, of what a dropout was applied to before the residual was added: dx where an element was
            kept, divided by 1 - dropout_p, and 0 where it was dropped.
    """

    dx: torch.Tensor | None
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None
    dx_bias: torch.Tensor | None
    ddropped: torch.Tensor | None = None


class QuantisedGradients(NamedTuple):
    """Gradients of `quantised_layernorm2d_bwd` and `quantised_rmsnorm2d_bwd`; None where one was not asked for.

    Attributes:
        dx: x's shape, in 16 bits or fp32: also the gradient of a residual that was added to x.
        rowwise: dx, as it is returned, quantised in groups of a row: x's shape, in out_dtype.
        rowwise_scale, columnwise, columnwise_scale: as `ColumnwiseOutput` has y_scale and these.
        dweight: (N,), in weight's dtype.
        dbias: (N,); LayerNorm only.
    """

    dx: torch.Tensor
    rowwise: torch.Tensor
    rowwise_scale: torch.Tensor
    columnwise: torch.Tensor
    columnwise_scale: torch.Tensor
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None


def dtype_of_all(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype of a gradient of several tensors, each rounded to its own dtype: one that holds all of them.

    So each is rounded once. Two types of 16 bits have fp32 in common.
    """
    return reduce(torch.promote_types, dtypes)


def aligned_length(length: int) -> int:
    """Return the number of fp32 values from one piece of a tensor to the next, each at a multiple of 16 bytes."""
    return -(-length // _STEP) * _STEP


def packing(m: int, mean: bool, norms: int = 1) -> tuple[int, int]:
    """Return the length of a tensor of the statistics of m rows, and the bytes to rstd; 0 if there are no means.

    Of several norms, those of the next one follow.
    """
    start, step = aligned_length(m) if mean else 0, aligned_length(m)
    return (norms - 1) * (start + step) + start + m, _ITEMSIZE * start


def of_norm(packed: torch.Tensor, at: int, m: int, mean: bool) -> torch.Tensor:
    """Return the statistics of one of two norms, as `packing` lays out those of one."""
    length, _ = packing(m, mean)
    return packed[at * (packed.numel() - length) :][:length]


def unpacked(packed: torch.Tensor, m: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the means of m rows, if there are any, and rstd, as views."""
    return (None, packed) if packed.numel() == m else (packed[:m], packed[-m:])


# The means of some rows, if there are any, and rstd: as `packing` lays them, or two tensors.
Statistics = torch.Tensor | tuple[torch.Tensor | None, torch.Tensor]


def unpacked_of(rows: torch.Tensor, statistics: Statistics) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Two tensors, of statistics of the rows of a tensor, (..., N)."""
    return statistics if isinstance(statistics, tuple) else unpacked(statistics, rows.numel() // rows.shape[-1])


def packed_of(*statistics: torch.Tensor) -> torch.Tensor:
    """Return the means, if there are any, and rstd in one tensor, as `packing` lays them out."""
    *means, rstd = (statistic.flatten() for statistic in statistics)
    padded = [torch.nn.functional.pad(mean, (0, aligned_length(mean.shape[0]) - mean.shape[0])) for mean in means]
    return torch.cat([*padded, rstd]) if padded else rstd


def unflattened(rows: Any, shape: tuple[int, ...]) -> Any:
    """Return rows whose last dimension is split into those of a shape."""
    return rows if len(shape) == 1 else rows.view(*rows.shape[:-1], *shape)


# TMA asks that each group's scales in column-major order start at a multiple of so many bytes.
_TMA = 16

# Rows and groups of a tile of scales.
_TILE = (128, 4)


def group_scales(
    make: Make, leading: Sequence[int], m: int, columns: int, dtype: torch.dtype, layout: ScaleLayout
) -> Any:
    """Memory for the scales of groups, (*leading, columns), where leading sizes are m in all, or for tiles of them."""
    if layout is not ScaleLayout.COLUMN_MAJOR:
        return make(tiled_shape(m, columns) if layout.swizzles else (*leading, columns), dtype=dtype)
    step = _TMA // dtype.itemsize
    padded = -(-m // step) * step
    scales = make((columns, padded), dtype=dtype)
    # The padding of rows is no part of the view. A slice would have a traced call guard on how long the padding is.
    return scales.as_strided((m, columns), (1, padded)).view(*leading, columns)


def columnwise_outputs(
    make: Make, mode: Mode, shape: Sequence[int], m: int, dtypes: Sequence[torch.dtype], layout: ScaleLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make what y quantised along columns is written to, and its scales.

    Args:
        make: makes a tensor.
        mode: the call's.
        shape: x's.
        m: the number of rows.
        dtypes: of both.
        layout: of the scales.
    """
    n, blocks = shape[-1], scale_columns(mode, m)
    if mode.columnwise.transposes:
        padded = -(-m // _TMA) * _TMA
        data = make((n, padded), dtype=dtypes[0]).as_strided((n, m), (padded, 1))
    else:
        data = make(tuple(shape), dtype=dtypes[0])
    rows, columns = (n, blocks) if mode.columnwise.transposes or layout.swizzles else (blocks, n)
    if mode.group_size.code:
        return data, group_scales(make, (rows,), rows, columns, dtypes[1], layout)
    # Behind the scales of whole columns is the amax of each.
    return data, make((2, n), dtype=dtypes[1])[0].view(rows, columns)


def y_shape(shape: Sequence[int], mode: Mode) -> tuple[int, ...]:
    """Return the shape of y for x's, (..., N): in torch's elements, one of which holds two of fp4."""
    return *shape[:-1], shape[-1] // mode.dtype_out.packs


def tiled_shape(m: int, columns: int) -> tuple[int, int]:
    """How many rows and groups there are of scales in tiles, those that the last tiles are filled up with too."""
    rows, groups = _TILE
    return -(-m // rows) * rows, -(-columns // groups) * groups


def scale_columns(mode: Mode, n: int) -> int:
    """How many elements of y_scale a row of n elements has: one in a mode without groups."""
    return -(-n // (mode.group_size.code * mode.scale_format.packs)) if mode.group_size.code else 1


def results_of(call: Call, make: Make) -> tuple[torch.Tensor | None, ...]:
    """Return the results of a call, made by `make` and not by kernels; None for results that are not asked for."""
    shapes: dict[Kind, Sequence[int]] = {
        Kind.ROWS: call.x.shape,
        Kind.VECTOR: call.x.shape[-1:],
        Kind.PER_ROW: call.x.shape[:-1],
    }
    shapes |= {Kind.PER_NORM: packing(call.m, call.function.norm.centres, 2)[:1], Kind.VALUE: (1,), Kind.COLUMNS: ()}
    results: dict[str, torch.Tensor | None] = {}
    for row in call.function.family.results:
        dtype = call.dtype_of(row.name)
        # A gradient of another kind has the shape of its operand, which may have one of several.
        shape = shapes.get(row.kind) if row.kind in shapes or dtype is None else call.args[row.like[0]].shape
        results[row.name] = None if dtype is None else make(shape, dtype=dtype)
    if call.mode.dtype_out.packs > 1:
        results["y"] = make(y_shape(call.x.shape, call.mode), dtype=call.dtype_of("y"))
    of_rows = "rowwise_scale" if call.mode.is_backward else "y_scale"
    scale_dtype = call.dtype_of(of_rows)
    if call.mode.group_size.code and scale_dtype is not None:
        columns = scale_columns(call.mode, call.n)
        results[of_rows] = group_scales(make, call.x.shape[:-1], call.m, columns, scale_dtype, call.scale_layout)
    if call.mode.columnwise.writes:
        names = ("columnwise", "columnwise_scale")
        dtypes: Any = [call.dtype_of(name) for name in names]
        made = columnwise_outputs(make, call.mode, call.x.shape, call.m, dtypes, call.scale_layout)
        results |= zip(names, made, strict=True)
    return tuple(results.values())


def dtypes_of(operands: Sequence[torch.Tensor | None]) -> tuple[torch.dtype | None, ...]:
    """Return the dtype of each operand; None for an absent one."""
    return tuple([None if operand is None else operand.dtype for operand in operands])


def rounded_to(gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a gradient in the dtype of its operand."""
    # A conversion to the same dtype takes a microsecond.
    return gradient if gradient is None or gradient.dtype is dtype else gradient.to(dtype)


def rounded(
    gradients: Sequence[torch.Tensor | None], dtypes: Sequence[torch.dtype | None], due: Iterable[object]
) -> list[torch.Tensor | None]:
    """Return the gradients that are due, each in the dtype of its operand; None for every other one."""
    each = zip(gradients, dtypes, due, strict=True)
    return [rounded_to(gradient, dtype) if needed and dtype is not None else None for gradient, dtype, needed in each]
