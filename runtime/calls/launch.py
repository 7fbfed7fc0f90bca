"""Allocates what a prepared forward call returns, and launches its kernel."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from ..kernels.pipelines import new_exchange
from ..upstream.torch_allocator import contiguous_strides
from .outputs import LayerNormOutput, pack, unpacked
from .plan import Plan

# Without the Python function that a named tuple's constructor is: 0.2 us of every call.
make_output = tuple.__new__


def run(
    plan: Plan,
    addresses: tuple[int, ...],
    tensors: tuple[torch.Tensor | None, ...],
    shape: torch.Size,
    m: int,
    eps: float,
    weight_offset: float,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    packed: bool,
) -> LayerNormOutput:
    """Allocate what a call returns and launch the kernel of its plan, unless there are no rows.

    Args:
        plan: the call's.
        addresses: of `plan.INPUTS`; 0 where there is none.
        tensors: likewise, x first.
        shape: x's.
        m: x's rows.
        eps: added to the variance.
        weight_offset: added to weight.
        out: where y goes, or None for a new tensor.
        residual_out: likewise.
        packed: whether to return what is saved of mean and rstd in one tensor, as `outputs` has them, as rstd.
    """
    empty, sum_dtype, scale_dtype = plan.empty, plan.sum_dtype, plan.scale_dtype
    size: tuple[int, ...]
    strides: tuple[int, ...]
    leading: tuple[int, ...]
    leading_strides: tuple[int, ...]
    if len(shape) == 2:
        size, strides, leading, leading_strides = (m, plan.n), (plan.n, 1), (m,), (1,)
    else:
        size, leading = tuple(shape), tuple(shape[:-1])
        strides, leading_strides = contiguous_strides(size), contiguous_strides(leading)
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
    if scale_dtype is not None:
        y_scale = empty(leading, leading_strides, scale_dtype)
        y_scale_at = y_scale.data_ptr()
    if packed:
        rstd, mean_at, rstd_at = pack(empty, m, plan.saves_mean)
    elif plan.saves_rstd:
        rstd = empty(leading, leading_strides, torch.float32)
        rstd_at = rstd.data_ptr()
        if plan.saves_mean:
            mean = empty(leading, leading_strides, torch.float32)
            mean_at = mean.data_ptr()
    outputs = make_output(LayerNormOutput, (y, total, y_scale, mean, rstd))
    if m == 0:
        return outputs
    launcher, grid, exchange, launch, _ = plan.prepared(m)
    work, work_at = None, 0
    if exchange is not None:
        work = new_exchange(empty, exchange(m))
        work_at = work.data_ptr()
    if launch is None:
        written = _as_tensors(plan, outputs, m, packed)
        launcher.launch_tensors(grid(m), (*tensors, *written, work, m, eps, weight_offset))
    else:
        written_at = (y.data_ptr(), total_at, y_scale_at, mean_at, rstd_at)
        launch(grid(m), (*addresses, *written_at, work_at, m, eps, weight_offset))
    return outputs


def _as_tensors(plan: Plan, outputs: LayerNormOutput, m: int, packed: bool) -> tuple[torch.Tensor | None, ...]:
    """Of `plan.OUTPUTS`; None where there is none."""
    y, total, y_scale, mean, rstd = outputs
    if packed and rstd is not None:
        mean, rstd = unpacked(rstd, m)
    return y.view(torch.uint8) if plan.y_bytes else y, total, y_scale, mean, rstd
