"""Norms with outputs quantised for inference engines: by groups, by static scales, and with y unquantised too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..calls import road
from ..calls.check import Call, check_device, check_dtype, check_no_gradient, check_operand, check_tensor, check_written
from ..calls.first import address_of
from ..calls.launch import Held, run_sized
from ..calls.outputs import (
    ColumnwiseOutput,
    QuantisedGradients,
    QuantisedOutput,
    columnwise_outputs,
    group_scales,
    packed_of,
    scale_columns,
    tiled_shape,
)
from ..calls.plan import MISALIGNED, PlannedCall
from ..calls.road import FamilyCalls, Options, Outs, calls_of
from ..calls.row_layout import elements_overlap
from ..codegen.families import Kind
from ..codegen.model import Mode
from ..codegen.parameters import FORWARD, QUANTISED, QUANTISED_BWD
from ..codegen.values import FusedAdd, FusedQuant, ScaleFormat, ScaleGroup, ScaleLayout
from ..dtypes import word
from ..errors import ConflictError, LayoutError, ShapeError
from ..kernels.gpu import ALIGNMENT
from ..selection.invariance import is_on
from ..upstream.dynamo_guards import contiguous_strides
from . import plain, post_add
from .modulated import row as modulated


def forward(operands: Any, options: Options, outs: Outs) -> QuantisedOutput | ColumnwiseOutput:
    """Run a call of `quantised_layer_norm` or `quantised_rms_norm`; y_scale, static or not, is among the outs.

    The last of these is what the amax is accumulated in, which is among the options too.
    """
    made, slot = road.launched_2d(CALLS, *arranged(operands, options, outs)), outs[-1]
    if slot is not None and made.amax is not slot:
        # An operator accumulates in a tensor of its own. TorchDynamo of torch 2.11 follows no `_replace`.
        *first, amax, mean, rstd, first_mean, first_rstd = made
        amax = slot.copy_(torch.maximum(slot, amax.view(slot.shape)))
        made = CALLS.output(*first, amax, mean, rstd, first_mean, first_rstd)
    return returned(made)


def returned(outputs: QuantisedOutput | ColumnwiseOutput) -> QuantisedOutput | ColumnwiseOutput:
    """Return the outputs of a call in the class that the call asked for."""
    is_narrow = isinstance(outputs, ColumnwiseOutput) and outputs.columnwise is None and outputs.amax is None
    y, total, y_scale, unquantised, *_ = outputs
    return QuantisedOutput(y, total, y_scale, unquantised) if is_narrow else outputs


def _record(_: FamilyCalls, operands: Any, options: Options, made: ColumnwiseOutput) -> ColumnwiseOutput:
    """Have autograd record y unquantised, and the sum, as the outputs of the norm alone."""
    named = road.named(CALLS, operands, options)
    calls = _BEHIND.get(word(FusedAdd, "fadd", named["fadd"]), plain.CALLS)
    calls = calls if named["scale"] is None else modulated.CALLS
    named |= {"fquant": "none", "out_dtype": None, "save_mv": True}
    settled = road.options_of(calls, options[0], named)
    # The statistics of both norms, if there are two.
    statistics = packed_of(*[each for each in (*made[-2:], *made[-4:-2]) if each is not None])
    recorded = made.unquantised, made.residual_out, statistics, is_on()
    y = calls.record(calls, road.operands_of(calls, named), settled, recorded)
    y, total = y if isinstance(y, tuple) else (y, None)
    return made._replace(unquantised=y, residual_out=total)


def arranged(operands: Any, options: Options, outs: Outs) -> tuple[Any, Options, Outs]:
    """Return the arguments of `forward` as the family's rows have them: a static y_scale is an operand."""
    norm, eps, weight_offset, fadd, fquant, out_dtype, cast, group_size, *of_scales, amax_out = options
    quantisation = word(FusedQuant, "fquant", fquant)
    if quantisation.is_static:
        quantisation, static = _given_scale(operands[0], outs[2])
        operands = (*operands[:_STATIC], *static, *operands[_STATIC + 2 :])
        outs = (*outs[:2], None, *outs[3:])
    group = ScaleGroup.NONE.value if group_size is None else group_size
    first = (norm, eps, weight_offset, fadd, quantisation.value, out_dtype, cast, group)
    return operands, (*first, *of_scales, amax_out is not None), outs


def _given_scale(x: torch.Tensor, y_scale: torch.Tensor | None) -> tuple[FusedQuant, tuple[Any, Any]]:
    """Return the mode and the operands of a static y_scale: one value, or one per column."""
    if y_scale is None:
        raise ConflictError(
            "fquant 'static' divides y by a y_scale and none was passed; pass one fp32 value on x's device, or (N,) of "
            "them, or fquant='dynamic'"
        )
    check_tensor("y_scale", y_scale)
    if y_scale.numel() == 1:
        return FusedQuant.STATIC, (y_scale, None)
    check_tensor("x", x)
    if x.dim() == 0 or tuple(y_scale.shape) != tuple(x.shape[-1:]):
        raise ShapeError(
            f"y_scale has shape {tuple(y_scale.shape)} and x {tuple(x.shape)}; with fquant 'static' it takes one "
            "value, or one a column, (N,)"
        )
    return FusedQuant.STATIC_COLUMN, (None, y_scale)


def _check(call: Call, outs: Outs, addressed: bool) -> None:
    """Check what quantises, and where outputs go."""
    if not call.mode.fquant.quantises:
        other = FORWARD.functions[call.mode.norm]
        raise ConflictError(f"fquant 'none' quantises nothing; call normforge.{other}, or pass fquant='dynamic'")
    if call.scale_layout is not ScaleLayout.ROW_MAJOR and not call.mode.group_size.code:
        raise ConflictError(
            f"scale_layout {call.scale_layout.value!r} is of scales of groups, and there are none; pass "
            "group_size=128, say, or leave scale_layout out"
        )
    if outs[1] is not None and addressed:
        check_no_gradient("has none where residual_out is passed", **call.tensors_read())
    others = road.check_outs(call, outs[:2], addressed)
    if outs[2] is not None:
        _check_scale_out(call, outs[2], addressed)
    if outs[3] is not None:
        check_operand(Kind.VALUE, "amax_out", outs[3], call.x)
    for name, out in zip(("y_scale", "amax_out"), outs[2:], strict=True):
        if out is not None:
            check_written(name, out, addressed)
            for other, tensor in others.items() if addressed else ():
                (start, end), (at, behind) = _span(out), _span(tensor)
                if start < behind and at < end:
                    raise LayoutError(f"{name} overlaps {other} in memory; pass memory of its own")
            others[name] = out


def _check_scale_out(call: Call, out: torch.Tensor, addressed: bool) -> None:
    dtype, leading = call.dtype_of("y_scale"), tuple(call.x.shape[:-1])
    # A static y_scale is an operand, and is not written to.
    assert dtype is not None
    check_tensor("y_scale", out)
    shapes = [leading, (*leading, 1)]
    if call.mode.scale_layout.swizzles:
        tiles = tiled_shape(call.m, scale_columns(call.mode, call.n))
        shapes = [tiles, (tiles[0] * tiles[1],)]
    elif call.mode.group_size.code:
        shapes = [(*leading, scale_columns(call.mode, call.n))]
    if tuple(out.shape) not in shapes:
        raise ShapeError(f"y_scale has shape {tuple(out.shape)}; it takes {' or '.join(map(str, shapes))}")
    check_dtype("y_scale", out, (dtype,))
    check_device("y_scale", out, call.x)
    if not out.is_contiguous():
        if not (call.mode.has_scale_strides and out.dim() == 2 and min(out.stride()) > 0):
            raise LayoutError(f"y_scale has strides {out.stride()}; pass a contiguous tensor")
        if elements_overlap(out):
            raise LayoutError(
                f"the elements of y_scale overlap (shape {tuple(out.shape)}, strides {out.stride()}); pass memory "
                "for each, a contiguous tensor say, or leave y_scale out"
            )
    if addressed and not call.mode.serves and address_of("y_scale", out) & MISALIGNED:
        # The kernel is that of `layernorm2d_fwd`, which allocates them.
        raise LayoutError(f"y_scale starts at no multiple of {ALIGNMENT} bytes; pass a tensor that does")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and behind its last byte; (0, 0) for a tensor without elements."""
    if tensor.numel() == 0:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def launch(
    planned: PlannedCall, options: Options, outs: Outs, held: Held = None, exchange: torch.Tensor | None = None
) -> QuantisedOutput | ColumnwiseOutput:
    """Allocate the outputs for which no tensor was passed, and launch the kernel of the plan, as `run_sized` does."""
    plan, addresses, tensors, shape, _, numbers = planned
    out, residual_out, y_scale, *amax_out = outs
    mode, dtypes = plan.mode, plan.dtypes
    made, amax = (y_scale, None, None, ()), amax_out[0] if amax_out else None
    if mode.group_size.code or mode.columnwise.writes:
        made = _scaled(planned, (dtypes[2], *dtypes[4:6]), options[_LAYOUT], y_scale)
    if mode.save_amax and amax is None:
        amax = plan.empty((1,), (1,), torch.float32).zero_()
    y_scale, *columns, further = made
    outs, numbers = (out, residual_out, y_scale, None, *columns, amax), (*numbers, *further)
    outputs = run_sized(plan, plan.at(shape), addresses, tensors, numbers, outs, held=held, exchange=exchange)
    if mode.stores_statistics or mode.save_amax:
        return ColumnwiseOutput._make(outputs)
    return QuantisedOutput._make(outputs[:4])


def backward(operands: Any, options: Options) -> QuantisedGradients:
    """Run a call of `quantised_layernorm2d_bwd` or `quantised_rmsnorm2d_bwd`."""
    *others, wants = options
    gradients: QuantisedGradients = road.launched_2d(GRADIENTS, operands, (*others, tuple(wants)))
    return gradients


def _launch_backward(planned: PlannedCall, options: Options, _: Outs) -> QuantisedGradients:
    plan, addresses, tensors, shape, m, numbers = planned
    *scaled, further = _scaled(planned, plan.dtypes[2:5], options[_LAYOUT_OF_GRADIENTS])
    results = run_sized(plan, plan.at(shape), addresses, tensors, (*numbers, *further), (None, None, *scaled))
    if m == 0:
        # Sums of nothing.
        results[5:] = [each if each is None else each.zero_() for each in results[5:]]
    return QuantisedGradients._make(results)


def _scaled(planned: PlannedCall, dtypes: Any, layout: Any, scale: Any = None) -> Any:
    """Return the scales of groups, columns and their scales or None, of these dtypes, and what launches bring of them.

    Scales that are passed are returned.
    """
    plan, _, _, shape, m, _ = planned
    mode, n, layout = plan.mode, plan.n, word(ScaleLayout, "scale_layout", layout)

    def make(sizes: Sequence[int], *, dtype: torch.dtype) -> Any:
        return plan.empty(tuple(sizes), contiguous_strides(tuple(sizes)), dtype)

    if mode.group_size.code:
        scale = group_scales(make, shape[:-1], m, scale_columns(mode, n), dtypes[0], layout) if scale is None else scale
        _fill_up(scale, scale, m, n, mode, layout)
    numbers = [*_scale_strides(mode.scale_format, scale)] if mode.has_scale_strides else []
    if not mode.columnwise.writes:
        return scale, None, None, numbers
    columnwise, columnwise_scale = columnwise_outputs(make, mode, shape, m, dtypes[1:], layout)
    by_column = columnwise_scale if mode.columnwise.transposes or layout.swizzles else columnwise_scale.t()
    _fill_up(columnwise_scale, by_column, n, m, mode, layout)
    numbers += [columnwise.stride(0) // ALIGNMENT] if mode.columnwise.transposes else []
    numbers += _scale_strides(mode.scale_format, by_column) if mode.has_scale_strides else []
    return scale, columnwise, columnwise_scale, numbers


def _fill_up(scale: torch.Tensor, by_row: torch.Tensor, rows: int, n: int, mode: Mode, layout: ScaleLayout) -> None:
    """Write zeros where scales of groups of n elements, in `rows` rows, have padding, or an amax behind them."""
    columns = scale_columns(mode, n)
    if not mode.group_size.code:
        # Kernels raise the amax of whole columns. No kernel runs without rows, where scales are those of zeros.
        scale.as_strided((rows,), (1,), rows if n else 0).fill_(n == 0)
    elif layout.swizzles and scale.numel() != rows * columns:
        # The padding of tiles.
        scale.view(torch.uint8).zero_()
    elif n <= (columns * mode.scale_format.packs - 1) * mode.group_size.code:
        # The bytes of an int32 behind the last group.
        by_row[..., -1].zero_()


def _scale_strides(kind: ScaleFormat, scale: torch.Tensor) -> tuple[int, int]:
    """Return the strides between rows' scales and between groups' scales, in the unit of kernels."""
    # In bytes if an int32 packs the scales of four groups.
    unit = scale.element_size() if kind.stores_exponents else 1
    # A dimension of one row may have any stride.
    rows = [stride for size, stride in zip(scale.shape[:-1], scale.stride()[:-1], strict=True) if size != 1]
    return rows[-1] * unit if rows else 0, scale.stride(-1) * unit


CALLS = calls_of(QUANTISED, output=ColumnwiseOutput, check=_check, launch=launch, record=_record)
GRADIENTS = calls_of(QUANTISED_BWD, output=QuantisedGradients, launch=_launch_backward)
_LAYOUT_OF_GRADIENTS = 1 + GRADIENTS.options.index("scale_layout")
# How autograd records calls that add the residual behind the norm, with another norm behind the sum or without.
_BEHIND = {FusedAdd.POST_ADD: post_add.CALLS, FusedAdd.POST_ADD_NORM: post_add.RENORMED_CALLS}
# The place of the layout among the options, behind the norm, and of the first static scale among the operands.
_LAYOUT, _STATIC = 1 + CALLS.options.index("scale_layout"), CALLS.inputs.index("static_scale")
