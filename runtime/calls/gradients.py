"""A backward call: launched at once if one like it was checked before, and checked if not; as `forward` does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from ..codegen.model import Norm
from ..kernels.gpu import require_device
from ..kernels.pipelines import new_exchange
from ..selection import dispatch
from ..upstream.torch_allocator import contiguous_strides
from ..upstream.torch_dynamo import eager_only
from .gradient_arguments import GradientCall, check, refuse_gradient
from .gradient_plan import INPUTS, SUMS, GradientPlan
from .launch import make_output
from .operands import (
    MISALIGNED,
    PLAIN,
    UNREADABLE,
    ZERO,
    Unlike,
    address_of,
    layout_of,
    offset_fits,
    refuse_foreign,
    resolved,
    rows_of,
    vector_of,
)
from .outputs import NormGradients, rstd_address, unpacked

_NORMS = {norm.value: norm for norm in Norm}

# What callers call the tensors of `gradient_plan.INPUTS`.
_OPERANDS = ("dy", "x", "x_bias", "weight", "mean", "rstd", "dresidual_out")

Tensors = tuple["torch.Tensor | None", ...]


@eager_only
def backward(
    norm: str,
    dy: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    packed: bool,
    weight_offset: float,
    x_bias: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    dx_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    wants: Collection[str],
    *,
    known_only: bool = False,
) -> NormGradients:
    """Launch a backward call; see `layernorm2d_bwd` for its arguments and errors.

    If packed, rstd holds the means too, if there are any, as `outputs` has them. If known_only, a call that is
    unlike any before is not checked.

    Raises:
        Unlike: known_only, and it is.
    """
    key: tuple[Any, ...] | None = None
    plan: GradientPlan | None = None
    addresses: tuple[int, ...]
    tensors: Tensors
    try:
        if dy is None or x.__class__ not in PLAIN:
            raise Unlike
        shape, device = x.shape, x.device
        n = shape[-1]
        m = x.numel() // n
        dy_at, dy_kind = rows_of(dy, shape, device)
        x_at = x.data_ptr()
        x_kind = x.dtype if x.is_contiguous() else layout_of(x)
        dresidual_at, dresidual_kind = (0, None) if dresidual_out is None else rows_of(dresidual_out, shape, device)
        weight_at, weight_kind = (0, None) if weight is None else vector_of(weight, n, device)
        x_bias_at, x_bias_kind = (0, None) if x_bias is None else vector_of(x_bias, n, device)
        if packed:
            rstd_at = rstd.data_ptr()
            mean_at, rstd_at = (rstd_at, rstd_address(rstd_at, m)) if norm == "layer" else (0, rstd_at)
        else:
            mean_at = 0 if norm == "rms" else _statistic_of(mean, shape, device)
            rstd_at = _statistic_of(rstd, shape, device)
        if wants.__class__ is list:
            wants = tuple(wants)
        if m == 0 or not x_at or x.is_neg() or wants.__class__ is not tuple:
            raise Unlike
        if weight_offset is not ZERO and not offset_fits(weight_offset, weight):
            raise Unlike
        # Whoever lets but known calls through has asked this before.
        tensors = (dy, x, x_bias, weight, mean, rstd, dresidual_out)
        if not known_only and (
            forward_ad._current_level >= 0 or (torch.is_grad_enabled() and _any_requires_gradient(*tensors))
        ):
            raise Unlike
        key = (
            norm, n, device, dy_kind, x_kind, dresidual_kind, weight_kind, x_bias_kind, dx_dtype, bias_dtype, wants,
        )  # fmt: skip
        addresses = (dy_at, x_at, x_bias_at, weight_at, mean_at, rstd_at, dresidual_at)
        if (dy_at | x_at | x_bias_at | weight_at | mean_at | rstd_at | dresidual_at) & MISALIGNED:
            key = (*key, tuple([not at & MISALIGNED for at in addresses]))
        plan = dispatch.plans.get(key)
    except UNREADABLE:
        key = None
    if plan is not None:
        return _run(plan, addresses, tensors, shape, packed, m, weight_offset)
    if known_only:
        raise Unlike
    refuse_foreign(dy=dy, x=x, weight=weight, mean=mean, rstd=rstd, x_bias=x_bias, dresidual_out=dresidual_out)
    call = check(
        _NORMS[norm],
        resolved(dy),
        resolved(x),
        resolved(weight),
        resolved(mean),
        resolved(rstd),
        packed,
        weight_offset,
        resolved(x_bias),
        resolved(dresidual_out),
        dx_dtype,
        bias_dtype,
        wants,
    )
    refuse_gradient(call)
    require_device(x)
    return _first(call, key)


def _any_requires_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    x_bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dresidual_out: torch.Tensor | None,
) -> bool:
    # Written out, because a loop takes longer.
    return (
        x.requires_grad
        or dy.requires_grad
        or (weight is not None and weight.requires_grad)
        or (dresidual_out is not None and dresidual_out.requires_grad)
        or (x_bias is not None and x_bias.requires_grad)
        or (mean is not None and mean.requires_grad)
        or rstd.requires_grad
    )


def _statistic_of(statistic: torch.Tensor | None, shape: torch.Size, device: torch.device) -> int:
    if statistic is None:
        raise Unlike
    at, kind = rows_of(statistic, shape[:-1], device)
    # What has gaps is of another kind.
    if kind is not torch.float32:
        raise Unlike
    return at


def _first(call: GradientCall, key: tuple[Any, ...] | None) -> NormGradients:
    """Launch a call that `check` passed, and make those like it known."""
    plans = dispatch.plans
    x, dy, mean, rstd = call.x, call.dy, call.mean, call.rstd
    if call.m == 0:
        return _of_no_rows(call)
    if dy is None:
        # A row of stride 0 stands for all rows of zeros.
        dy = torch.zeros(call.n, dtype=x.dtype, device=x.device).expand(x.shape)
        call = replace(call, dy=dy)
    if call.packed:
        mean, rstd = unpacked(rstd, call.m)
    tensors = (dy, x, call.x_bias, call.weight, mean, rstd, call.dresidual_out)
    addresses = tuple(map(address_of, _OPERANDS, tensors))
    plan = None if key is None else plans.get(key)
    if plan is None:
        at = zip(INPUTS, addresses, strict=True)
        plan = GradientPlan(call, [name for name, address in at if address & MISALIGNED])
        if key is not None:
            dispatch.remember(plans, key, plan)
    return _run(plan, addresses, tensors, x.shape, False, call.m, float(call.weight_offset))


def _of_no_rows(call: GradientCall) -> NormGradients:
    x, weight, x_bias, wants = call.x, call.weight, call.x_bias, call.wants
    bias_dtype = call.bias_dtype or (x if weight is None else weight).dtype
    return NormGradients(
        dx=torch.empty(x.shape, dtype=call.dx_dtype or x.dtype, device=x.device) if "dx" in wants else None,
        dweight=torch.zeros_like(weight) if "dweight" in wants and weight is not None else None,
        dbias=torch.zeros(call.n, dtype=bias_dtype, device=x.device) if "dbias" in wants else None,
        dx_bias=torch.zeros_like(x_bias) if "dx_bias" in wants and x_bias is not None else None,
    )


def _run(
    plan: GradientPlan,
    addresses: tuple[int, ...],
    tensors: Tensors,
    shape: torch.Size,
    packed: bool,
    m: int,
    weight_offset: float,
) -> NormGradients:
    layout, empty, n, dx_dtype = plan.layout(m), plan.empty, plan.n, plan.dx_dtype
    dx = None
    if dx_dtype is not None:
        if len(shape) == 2:
            dx = empty((m, n), (n, 1), dx_dtype)
        else:
            size = tuple(shape)
            dx = empty(size, contiguous_strides(size), dx_dtype)
    dweight, dbias, dx_bias = [None if dtype is None else empty((n,), (1,), dtype) for dtype in plan.sum_dtypes]
    work = empty((layout.length,), (1,), torch.float32) if layout.length else None
    exchange = new_exchange(empty, layout.exchange) if layout.exchange else None
    gradients = make_output(NormGradients, (dx, dweight, dbias, dx_bias))
    given: tuple[Any, ...] = addresses
    made: list[Any]
    pieces: list[Any]
    if layout.by_address:
        base = 0 if work is None else work.data_ptr()
        pieces = [base + offset for offset in layout.offsets]
        pieces.append(0 if exchange is None else exchange.data_ptr())
        made = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
    else:
        given = _unpacked(tensors, m) if packed else tensors
        pieces = [None if start is None or work is None else work[start:] for start in layout.starts]
        pieces.append(exchange)
        made = list(gradients)
    values = (*given, made[0], *pieces, m, weight_offset)
    for launch, grid in layout.steps:
        launch(grid, values)
    if layout.finish is not None:
        layout.finish(layout.finish_grid, (*pieces[: len(SUMS)], *made[1:], layout.programs))
    return gradients


def _unpacked(tensors: Tensors, m: int) -> Tensors:
    *before, _, rstd, dresidual_out = tensors
    assert rstd is not None
    means, rstds = unpacked(rstd, m)
    return *before, means, rstds, dresidual_out
