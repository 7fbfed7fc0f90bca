"""Allocates what a call returns, and launches its kernels.

There is a function for each form of what is returned, written out: backward calls took 0.2 us more where one function
launched whatever a plan has, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..kernels.assembly import SUMS
from ..kernels.launcher import new_exchange
from ..upstream.dynamo_guards import contiguous_strides
from .check import Call
from .known_backward import addresses_of
from .outputs import LayerNormOutput, NormGradients, results_of, unpacked
from .plan import Layout, Plan

# Without the Python function that a named tuple's constructor is: 0.2 us of every call.
make_output = tuple.__new__

Tensors = tuple["torch.Tensor | None", ...]


def run(
    plan: Plan,
    addresses: tuple[int, ...],
    tensors: Tensors,
    shape: torch.Size,
    m: int,
    eps: float,
    weight_offset: float,
    dropout_p: float = 0.0,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    *,
    packed: bool = False,
) -> LayerNormOutput:
    """Allocate what a forward call returns and launch the kernel of its plan, unless there are no rows.

    Args:
        plan: the call's.
        addresses: of the tensors that are read, in the family's order; 0 where there is none.
        tensors: these themselves.
        shape: x's.
        m: x's rows.
        eps: added to the variance.
        weight_offset: added to weight.
        dropout_p: of a plan with dropout.
        out: where y goes, or None for a new tensor.
        residual_out: likewise.
        packed: whether mean and rstd are in one tensor, which is returned as rstd.
    """
    empty, n = plan.empty, plan.n
    _, sum_dtype, scale_dtype, mean_dtype, rstd_dtype = plan.dtypes
    launch, grid, length, to_rstd = plan.forward(m)
    size: tuple[int, ...] = (m, n) if len(shape) == 2 else tuple(shape)
    strides: tuple[int, ...] = (n, 1) if len(shape) == 2 else contiguous_strides(size)
    if out is None:
        y = empty(size, strides, plan.y_dtype)
    else:
        y = out
        # What autograd kept of it is no longer what it was, and it finds out by this.
        increment_version(y)
    total = y_scale = mean = rstd = None
    total_at = y_scale_at = mean_at = rstd_at = 0
    if sum_dtype is not None:
        if residual_out is None:
            total = empty(size, strides, sum_dtype)
        else:
            total = residual_out
            increment_version(total)
        total_at = total.data_ptr()
    if packed:
        rstd = empty((length,), (1,), torch.float32)
        start = rstd.data_ptr()
        mean_at, rstd_at = start if to_rstd else 0, start + to_rstd
    elif scale_dtype is not None or rstd_dtype is not None:
        leading = size[:-1]
        leading_strides = (1,) if len(shape) == 2 else contiguous_strides(leading)
        if scale_dtype is not None:
            y_scale = empty(leading, leading_strides, scale_dtype)
            y_scale_at = y_scale.data_ptr()
        if rstd_dtype is not None:
            rstd = empty(leading, leading_strides, rstd_dtype)
            rstd_at = rstd.data_ptr()
        if mean_dtype is not None:
            mean = empty(leading, leading_strides, mean_dtype)
            mean_at = mean.data_ptr()
    outputs = make_output(LayerNormOutput, (y, total, y_scale, mean, rstd))
    if m == 0:
        return outputs
    if launch is None:
        written = (y.data_ptr(), total_at, y_scale_at, mean_at, rstd_at)
        launch_otherwise(plan, m, addresses, tensors, written, outputs, (eps, weight_offset), dropout_p)
    else:
        values = (
            *addresses, y.data_ptr(), total_at, y_scale_at, mean_at, rstd_at, 0, m, eps, weight_offset,
        )  # fmt: skip
        launch(grid, (*values, dropout_p) if dropout_p else values)
    return outputs


# Launches a call that autograd records: rstd is one tensor with the means.
run_recorded = partial(run, packed=True)

# y, the stored sum or None, the statistics of the rows in one tensor, and whether the call is batch invariant.
Recorded = tuple[torch.Tensor, "torch.Tensor | None", torch.Tensor, bool]


def recorded_of(found: Any) -> Recorded:
    """Launch a call that was looked up or planned, for autograd to record."""
    y, total, _, _, statistics = run_recorded(*found)
    assert statistics is not None
    return y, total, statistics, found[0].is_invariant


def run_backward(
    plan: Plan,
    addresses: tuple[int, ...],
    tensors: Tensors,
    shape: torch.Size,
    m: int,
    weight_offset: float,
    dropout_p: float = 0.0,
) -> NormGradients:
    """Allocate what a backward call of some rows returns and launch the kernels of its plan.

    rstd may be in one tensor with the means, if there are any, and mean None; the addresses are each one's own.
    """
    layout, empty, n, dx_dtype = plan.layout(m), plan.empty, plan.n, plan.dtypes[0]
    dx = None
    if dx_dtype is not None:
        if len(shape) == 2:
            dx = empty((m, n), (n, 1), dx_dtype)
        else:
            size = tuple(shape)
            dx = empty(size, contiguous_strides(size), dx_dtype)
    sums = [None if dtype is None else empty((n,), (1,), dtype) for dtype in plan.sum_dtypes]
    ddropped = None
    if dropout_p and plan.dtypes[-1] is not None:
        size = tuple(shape)
        ddropped = empty(size, contiguous_strides(size), plan.dtypes[-1])
    gradients = make_output(NormGradients, (dx, *sums, ddropped))
    given: Sequence[Any] = addresses
    written: Tensors = gradients
    if not layout.by_address:
        given, written = _as_tensors(plan, m, tensors, gradients)
    dropped: tuple[Any, ...] = ()
    if dropout_p:
        dropped = (dropout_p, *(addresses_of(written[-1:]) if layout.by_address else written[-1:]))
    run_layout(plan, layout, given, written[:-1], (m, weight_offset, *dropped))
    return gradients


def run_layout(
    plan: Plan, layout: Layout, values: Sequence[Any], results: Sequence[torch.Tensor | None], numbers: Sequence[float]
) -> None:
    """Launch the kernels of a layout.

    Args:
        plan: their plan.
        layout: how the kernels are launched.
        values: what launches bring before the results, as addresses or as tensors, as the layout takes them.
        results: the tensors that kernels write, the family's sums last.
        numbers: what launches bring behind all pointers.
    """
    work = plan.empty((layout.length,), (1,), torch.float32) if layout.length else None
    exchange = new_exchange(plan.empty, layout.exchange) if layout.exchange else None
    count, others = len(plan.sum_dtypes), len(SUMS) - len(plan.sum_dtypes)
    pieces: list[Any]
    made: Sequence[Any]
    absent: tuple[int | None, ...]
    if layout.by_address:
        base = 0 if work is None else work.data_ptr()
        pieces = [base + offset for offset in layout.offsets]
        pieces.append(0 if exchange is None else exchange.data_ptr())
        made, absent = addresses_of(results), (0,) * others
    else:
        pieces = [None if start is None or work is None else work[start:] for start in layout.starts]
        pieces.append(exchange)
        made, absent = results, (None,) * others
    rows = len(made) - count
    given = (*values, *made[:rows], *pieces, *numbers)
    for launch, grid in layout.steps:
        launch(grid, given)
    if layout.finish is not None:
        launch, grid = layout.finish
        launch(grid, (*pieces[:count], *absent, *made[rows:], *absent, layout.programs))


def of_no_rows(call: Call) -> NormGradients:
    """What a backward call without rows returns: sums of nothing."""
    return NormGradients(*results_of(call, partial(torch.zeros, device=call.x.device)))


def launch_otherwise(
    plan: Plan,
    m: int,
    addresses: tuple[int, ...],
    tensors: Tensors,
    written: tuple[int, ...],
    outputs: LayerNormOutput,
    numbers: tuple[float, float],
    dropout_p: float = 0.0,
) -> None:
    """Launch a forward kernel that takes tensors, or whose programs exchange values.

    Args:
        plan: the call's.
        m: its rows.
        addresses: of what is read.
        tensors: these themselves.
        written: the addresses of what is returned.
        outputs: these themselves.
        numbers: eps and weight_offset.
        dropout_p: of a plan with dropout.
    """
    ready = plan.prepared(m)
    exchange = None if ready.exchange is None else new_exchange(plan.empty, ready.exchange(m))
    values: tuple[Any, ...]
    if ready.by_address:
        values = (*addresses, *written, 0 if exchange is None else exchange.data_ptr())
    else:
        given, made = _as_tensors(plan, m, tensors, outputs)
        values = (*given, *made, exchange)
    (step,) = ready.steps
    values = (*values, m, *numbers)
    step.launch(step.grid(m), (*values, dropout_p) if dropout_p else values)


def _as_tensors(plan: Plan, m: int, tensors: Tensors, results: Tensors) -> tuple[Tensors, Tensors]:
    """What is read and what is returned, as kernels that take tensors know them."""
    by_name = {row.name: tensor for row, tensor in zip(plan.family.inputs, tensors, strict=True)}
    by_name |= {row.name: tensor for row, tensor in zip(plan.family.results, results, strict=True)}
    rstd = by_name["rstd"]
    if by_name["mean"] is None and rstd is not None:
        by_name["mean"], by_name["rstd"] = unpacked(rstd, m)
    for name in plan.as_bytes:
        tensor = by_name[name]
        by_name[name] = None if tensor is None else tensor.view(torch.uint8)
    found = tuple(by_name.values())
    return found[: len(tensors)], found[len(tensors) :]
