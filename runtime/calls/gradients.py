"""A backward call: launched at once if one like it was checked before, and checked if not; as `forward` does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from ..codegen.model import Norm
from ..codegen.parameters import BACKWARD
from ..kernels.gpu import require_device
from ..selection import dispatch
from ..upstream.torch_dynamo import eager_only
from .gradient_arguments import GradientCall, check, refuse_gradient
from .launch import of_no_rows, run_backward
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
from .plan import Plan

_NORMS = {norm.value: norm for norm in Norm}

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
    plan: Plan | None = None
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
        tensors = (dy, x, weight, mean, rstd, x_bias, dresidual_out)
        if not known_only and (
            forward_ad._current_level >= 0 or (torch.is_grad_enabled() and _any_requires_gradient(*tensors))
        ):
            raise Unlike
        key = (
            norm, n, device, dy_kind, x_kind, dresidual_kind, weight_kind, x_bias_kind, dx_dtype, bias_dtype, wants,
        )  # fmt: skip
        addresses = (dy_at, x_at, weight_at, mean_at, rstd_at, x_bias_at, dresidual_at)
        if (dy_at | x_at | x_bias_at | weight_at | mean_at | rstd_at | dresidual_at) & MISALIGNED:
            key = (*key, tuple([not at & MISALIGNED for at in addresses]))
        plan = dispatch.plans.get(key)
    except UNREADABLE:
        key = None
    if plan is not None:
        return run_backward(plan, addresses, tensors, shape, m, weight_offset)
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
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    x_bias: torch.Tensor | None,
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
    x = call.x
    if call.m == 0:
        return of_no_rows(call)
    if call.dy is None:
        # A row of stride 0 stands for all rows of zeros.
        dy = torch.zeros(call.n, dtype=x.dtype, device=x.device).expand(x.shape)
        call = replace(call, dy=dy)
    if call.packed:
        mean, rstd = unpacked(call.rstd, call.m)
        call = replace(call, mean=mean, rstd=rstd)
    tensors = {row: getattr(call, row.name) for row in BACKWARD.inputs}
    at = {row.slot: address_of(row.name, tensor) for row, tensor in tensors.items()}
    plan = None if key is None else plans.get(key)
    if plan is None:
        plan = Plan(call, [slot for slot, address in at.items() if address & MISALIGNED])
        if key is not None:
            dispatch.remember(plans, key, plan)
    return run_backward(plan, tuple(at.values()), tuple(tensors.values()), x.shape, call.m, float(call.weight_offset))
