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

from ..kernels.launcher import new_exchange
from .check import Call
from .known import addresses_of
from .outputs import LayerNormOutput, NormGradients, results_of, unpacked
from .plan import Layout, Plan, make_of

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
        residual_out: where the stored sum goes, or None for a new tensor.
        packed: whether mean and rstd are in one tensor, which is returned as rstd.
    """
    empty = plan.empty
    layout, _, makes, recorded = plan.at(shape)
    asked: Any = recorded if packed else makes
    of_y, of_total, of_scale, of_mean, of_rstd = asked
    if out is None:
        y = empty(*of_y)
    else:
        y = out
        # A tensor that autograd saved has changed: autograd finds out by the version.
        increment_version(y)
    total = y_scale = mean = rstd = None
    total_at = y_scale_at = mean_at = rstd_at = 0
    if of_total is not None:
        if residual_out is None:
            total = empty(*of_total)
        else:
            total = residual_out
            increment_version(total)
        total_at = total.data_ptr()
    if of_scale is not None:
        y_scale = empty(*of_scale)
        y_scale_at = y_scale.data_ptr()
    if of_rstd is not None:
        rstd = empty(*of_rstd)
        rstd_at = rstd.data_ptr()
    if of_mean is not None:
        mean = empty(*of_mean)
        mean_at = mean.data_ptr()
    elif packed and layout.to_rstd:
        mean_at, rstd_at = rstd_at, rstd_at + layout.to_rstd
    outputs = make_output(LayerNormOutput, (y, total, y_scale, mean, rstd))
    if m == 0:
        return outputs
    written = y.data_ptr(), total_at, y_scale_at, mean_at, rstd_at
    numbers = (m, eps, weight_offset, dropout_p) if dropout_p else (m, eps, weight_offset)
    if layout.in_c:
        ((launch, grid),) = layout.steps
        launch(grid, (*addresses, *written, 0, *numbers))
    elif layout.by_address:
        run_layout(plan, layout, addresses, written, numbers)
    else:
        run_layout(plan, layout, *_as_tensors(plan, m, tensors, outputs), numbers)
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
    layout, numbers, makes, _ = plan.at(shape)
    empty = plan.empty
    made = [None if make is None else empty(*make) for make in makes]
    of_dropped = make_of(shape, plan.dtypes[-1]) if dropout_p else None
    gradients = make_output(NormGradients, (*made, None if of_dropped is None else empty(*of_dropped)))
    given: Sequence[Any] = addresses
    written: Sequence[Any] = gradients
    if layout.by_address:
        written = addresses_of(gradients)
    else:
        given, written = _as_tensors(plan, m, tensors, gradients)
    dropped = (dropout_p, written[-1]) if dropout_p else ()
    run_layout(plan, layout, given, written[:-1], (*numbers, weight_offset, *dropped))
    return gradients


def run_layout(
    plan: Plan, layout: Layout, values: Sequence[Any], made: Sequence[Any], numbers: Sequence[float]
) -> None:
    """Launch the kernels of a layout.

    Args:
        plan: their plan.
        layout: how the kernels are launched.
        values: what launches bring before the results, as addresses or as tensors, as the layout takes them.
        made: what kernels write, in the same form, the family's sums last.
        numbers: what launches bring behind all pointers.
    """
    work = None if layout.memory is None else plan.empty(*layout.memory)
    exchange = new_exchange(plan.empty, layout.exchange) if layout.exchange else None
    pieces: list[Any]
    absent = 0 if layout.by_address else None
    if layout.by_address:
        base = 0 if work is None else work.data_ptr()
        pieces = [base + offset for offset in layout.offsets]
        pieces.append(0 if exchange is None else exchange.data_ptr())
    else:
        pieces = [None if start is None or work is None else work[start:] for start in layout.starts]
        pieces.append(exchange)
    rows = len(made) - layout.sums
    given = (*values, *made[:rows], *pieces, *numbers)
    for launch, grid in layout.steps:
        launch(grid, given)
    if layout.finish is not None:
        launch, grid = layout.finish
        launch(grid, layout.adds((layout.programs, absent, *made[rows:], *pieces)))


def of_no_rows(call: Call) -> NormGradients:
    """Return the results of a backward call without rows: sums of nothing."""
    return NormGradients(*results_of(call, partial(torch.zeros, device=call.x.device)))


def _as_tensors(plan: Plan, m: int, tensors: Tensors, results: Tensors) -> tuple[Tensors, Tensors]:
    """Return the tensors that are read and the results, as kernels that take tensors need them."""
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
