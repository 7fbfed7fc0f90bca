"""Allocates what a prepared forward call returns, and launches its kernel."""

from __future__ import annotations

import torch

from .output import LayerNormOutput
from .plan import Plan
from .row_statistics import packed_length, rstd_address, unpacked
from .rules import new_exchange

# Without the Python function that a named tuple's constructor is: 0.2 us of every call.
make_output = tuple.__new__


def run(
    plan: Plan,
    addresses: tuple[int, ...],
    tensors: tuple[torch.Tensor | None, ...],
    m: int,
    eps: float,
    weight_offset: float,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    packed: bool,
) -> LayerNormOutput:
    """Allocate what a call returns and launch the kernel of its plan, unless there are no rows.

    Sizes are given as numbers where there are few: a tuple takes twice as long to parse, up to 1 us of a call.

    Args:
        plan: the call's.
        addresses: of `plan.INPUTS`; 0 where there is none.
        tensors: likewise, x first.
        m: x's rows.
        eps: added to the variance.
        weight_offset: added to weight.
        out: where y goes, or None for a new tensor.
        residual_out: likewise.
        packed: whether to return what is saved of mean and rstd in one tensor, as `row_statistics` has them, as rstd.
    """
    x = tensors[0]
    assert x is not None
    flat = x.dim() == 2
    y = (plan.y_like.new_empty(m, plan.n) if flat else plan.y_like.new_empty(x.shape)) if out is None else out
    total = y_scale = mean = rstd = None
    if plan.sum_like is not None:
        total = residual_out
        if total is None:
            total = plan.sum_like.new_empty(m, plan.n) if flat else plan.sum_like.new_empty(x.shape)
    if plan.scale_like is not None:
        y_scale = plan.scale_like.new_empty(m) if flat else plan.scale_like.new_empty(x.shape[:-1])
    if packed:
        rstd = plan.statistic_like.new_empty(packed_length(m, mean=plan.saves_mean))
    elif plan.saves_rstd:
        like = plan.statistic_like
        rstd = like.new_empty(m) if flat else like.new_empty(x.shape[:-1])
        if plan.saves_mean:
            mean = like.new_empty(m) if flat else like.new_empty(x.shape[:-1])
    outputs = make_output(LayerNormOutput, (y, total, y_scale, mean, rstd))
    if m == 0:
        return outputs
    launcher, grid, exchange, _ = plan.prepared(m)
    work = None if exchange is None else new_exchange(plan.exchange_like, exchange(m))
    launch = launcher.launch
    if launch is None:
        written = _as_tensors(plan, outputs, m, packed)
        launcher.launch_tensors(grid(m), (*tensors, *written, work, m, eps, weight_offset))
    else:
        at = 0 if work is None else work.data_ptr()
        launch(grid(m), (*addresses, *_as_addresses(plan, outputs, m, packed), at, m, eps, weight_offset))
    return outputs


def _as_addresses(plan: Plan, outputs: LayerNormOutput, m: int, packed: bool) -> tuple[int, ...]:
    """Of `plan.OUTPUTS`; 0 where there is none."""
    y, total, y_scale, mean, rstd = [0 if tensor is None else tensor.data_ptr() for tensor in outputs]
    if packed and plan.saves_mean:
        mean, rstd = rstd, rstd_address(rstd, m)
    return y, total, y_scale, mean, rstd


def _as_tensors(plan: Plan, outputs: LayerNormOutput, m: int, packed: bool) -> tuple[torch.Tensor | None, ...]:
    """Likewise."""
    y, total, y_scale, mean, rstd = outputs
    if packed and rstd is not None:
        mean, rstd = unpacked(rstd, m)
    return y.view(torch.uint8) if plan.y_bytes else y, total, y_scale, mean, rstd
