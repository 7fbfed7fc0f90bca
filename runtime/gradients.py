"""A backward call: launched at once if one like it was checked before, and checked if not; as `forward` does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from . import dispatch
from .codegen.model import Norm
from .gradient_arguments import GradientCall, check
from .gradient_plan import INPUTS, SUMS, GradientPlan
from .kernels import require_device
from .launch import make_output
from .operands import MISALIGNED, UNREADABLE, Unlike, rows_of, vector_of
from .output import NormGradients
from .row_statistics import aligned_length, rstd_address, unpacked
from .rules import new_exchange

_NORMS = {norm.value: norm for norm in Norm}

Tensors = tuple["torch.Tensor | None", ...]


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

    If packed, rstd holds the means too, if there are any, as `row_statistics` has them. If known_only, a call that is
    unlike any before is not checked.

    Raises:
        Unlike: known_only, and it is.
    """
    key: tuple[Any, ...] | None = None
    plan: GradientPlan | None = None
    try:
        shape, device = x.shape, x.device
        n = shape[-1]
        m = x.numel() // n
        if dy is None:
            raise Unlike
        dy_at, dy_kind = rows_of(dy, shape, device)
        x_at, x_kind = rows_of(x, shape, device)
        dresidual_at, dresidual_kind = (0, None) if dresidual_out is None else rows_of(dresidual_out, shape, device)
        weight_at, weight_kind = (0, None) if weight is None else vector_of(weight, n, device)
        x_bias_at, x_bias_kind = (0, None) if x_bias is None else vector_of(x_bias, n, device)
        if packed:
            rstd_at = rstd.data_ptr()
            mean_at, rstd_at = (rstd_at, rstd_address(rstd_at, m)) if norm == "layer" else (0, rstd_at)
        else:
            mean_at = 0 if mean is None else _statistic_of(mean, shape, device)
            rstd_at = _statistic_of(rstd, shape, device)
        if wants.__class__ is list:
            wants = tuple(wants)
        if m == 0 or weight_offset.__class__ is not float or wants.__class__ is not tuple:
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
        return _run(plan, addresses, (dy, x, x_bias, weight, mean, rstd, dresidual_out), packed, m, weight_offset)
    if known_only:
        raise Unlike
    call = check(
        _NORMS[norm],
        dy,
        x,
        weight,
        mean,
        rstd,
        packed,
        weight_offset,
        x_bias,
        dresidual_out,
        dx_dtype,
        bias_dtype,
        wants,
    )
    require_device(x)
    return _first(call, key)


def _statistic_of(statistic: torch.Tensor, shape: torch.Size, device: torch.device) -> int:
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
    addresses = tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
    plan = None if key is None else plans.get(key)
    if plan is None:
        at = zip(INPUTS, addresses, strict=True)
        plan = GradientPlan(call, [name for name, address in at if address & MISALIGNED])
        if key is not None:
            dispatch.remember(plans, key, plan)
    return _run(plan, addresses, tensors, False, call.m, float(call.weight_offset))


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
    plan: GradientPlan, addresses: tuple[int, ...], tensors: Tensors, packed: bool, m: int, weight_offset: float
) -> NormGradients:
    _, x, x_bias, weight, _, _, _ = tensors
    assert x is not None
    dx = dweight = dbias = dx_bias = None
    if plan.dx_dtype is not None:
        dx = torch.empty_like(x) if plan.dx_alike else torch.empty(x.shape, dtype=plan.dx_dtype, device=x.device)
    if plan.sums[0] and weight is not None:
        dweight = torch.empty_like(weight)
    if plan.dbias_like is not None:
        dbias = plan.dbias_like.new_empty(plan.n)
    if plan.sums[2] and x_bias is not None:
        dx_bias = torch.empty_like(x_bias)
    gradients = make_output(NormGradients, (dx, dweight, dbias, dx_bias))
    ready = plan.prepared(m)
    programs = min(ready.most_programs, -(-m // ready.rows))
    # Partial sums of every gradient, and what the first step leaves for the next, in one allocation.
    section, term = aligned_length(programs * plan.n), aligned_length(m)
    sums = plan.count * section
    length = sums + ready.row_terms * term
    work = plan.fp32_like.new_empty(length) if length else plan.fp32_like
    starts = [None if place is None else place * section for place in plan.places]
    starts += [sums + place * term for place in range(ready.row_terms)]
    exchange = None if ready.exchange is None else new_exchange(plan.exchange_like, ready.exchange(m))
    given: tuple[Any, ...] = addresses
    made: list[Any]
    pieces: list[Any]
    if ready.by_address:
        base = work.data_ptr()
        made = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
        pieces = [0 if start is None else base + 4 * start for start in starts]
        pieces.append(0 if exchange is None else exchange.data_ptr())
    else:
        given = _unpacked(tensors, m) if packed else tensors
        made = list(gradients)
        pieces = [*[None if start is None else work[start:] for start in starts], exchange]
    values = (*given, made[0], *pieces, m, weight_offset)
    for step in ready.steps:
        step.launch(step.grid(m, programs), values)
    if ready.finish is not None:
        ready.finish(ready.finish_grid, (*pieces[: len(SUMS)], *made[1:], programs))
    return gradients


def _unpacked(tensors: Tensors, m: int) -> Tensors:
    *before, _, rstd, dresidual_out = tensors
    assert rstd is not None
    means, rstds = unpacked(rstd, m)
    return *before, means, rstds, dresidual_out
