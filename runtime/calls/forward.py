"""A forward call: launched at once if one like it was checked before, and checked if not.

A key holds everything that `prepare` looks at and that stays the same from call to call: of each tensor whether it is
there, its type, its layout and whether it is aligned; each mode as it was given; N and the device. It is entered once
`prepare` has passed a call of it. What no key can hold is looked at in each call: that shapes fit x's, that tensors are
on its device, the numbers, whether an output overlaps another tensor, whether a gradient is asked of what has none. A
call that fails there, or whose key is new, goes through `prepare`, which accepts it or says what is wrong with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from ..codegen.model import FusedAdd, FusedQuant, Norm, Rounding
from ..codegen.parameters import FORWARD
from ..kernels.gpu import require_device
from ..selection import dispatch
from ..upstream.torch_allocator import contiguous_strides
from ..upstream.torch_dynamo import eager_only
from .arguments import LARGEST_FP32, Call, prepare, refuse_gradient
from .launch import make_output, run, run_recorded
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
from .outputs import LayerNormOutput, pack
from .overlap import may_write
from .plan import Plan

# Keys hold a norm's word: hashing an enum's member takes Python code.
_NORMS = {norm.value: norm for norm in Norm}

Key = tuple[Any, ...]

# The address of a tensor that is not there, and what a key holds of it.
_ABSENT = (0, None)


@eager_only
def forward_plain(
    norm: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    save_mv: bool = False,
    *,
    packed: bool = False,
    known_only: bool = False,
) -> LayerNormOutput:
    """Launch a forward call with nothing fused; see `layernorm2d_fwd` for its arguments and errors.

    This is the shortest way through, and written out: each function called on it takes 0.1 us.

    Args:
        norm: the norm's word.
        x: see `layernorm2d_fwd`.
        weight: likewise.
        bias: likewise.
        eps: likewise.
        weight_offset: see `rmsnorm2d_fwd`.
        save_mv: see `layernorm2d_fwd`; True or False itself.
        packed: see `launch.run_recorded`.
        known_only: do not check a call that is unlike any before.

    Raises:
        Unlike: known_only, and it is.
    """
    key: Key | None = None
    plan: Plan | None = None
    try:
        # First, because reading a fake tensor's address is a warning.
        if x.__class__ not in PLAIN:
            raise Unlike
        shape = x.shape
        n = shape[-1]
        device = x.device
        x_at = x.data_ptr()
        kind = x.dtype if x.is_contiguous() else layout_of(x)
        vector = (n,)
        weight_at = bias_at = 0
        weight_kind = bias_kind = None
        if weight is not None:
            weight_kind = weight.dtype
            if (
                weight.__class__ not in PLAIN
                or weight.device != device
                or weight.shape != vector
                or not weight.is_contiguous()
                or not (weight_at := weight.data_ptr())
                or weight.is_neg()
            ):
                raise Unlike
        if bias is not None:
            bias_kind = bias.dtype
            if (
                bias.__class__ not in PLAIN
                or bias.device != device
                or bias.shape != vector
                or not bias.is_contiguous()
                or not (bias_at := bias.data_ptr())
                or bias.is_neg()
            ):
                raise Unlike
        flat = len(shape) == 2
        m = shape[0] if flat else x.numel() // n
        if m == 0 or not x_at or x.is_neg():
            raise Unlike
        # Whoever lets but known calls through has asked this before.
        if not known_only and (
            forward_ad._current_level >= 0
            or (
                torch.is_grad_enabled()
                and (
                    x.requires_grad
                    or (weight is not None and weight.requires_grad)
                    or (bias is not None and bias.requires_grad)
                )
            )
        ):
            raise Unlike
        key = (norm, n, device, kind, weight_kind, bias_kind, save_mv)
        if (x_at | weight_at | bias_at) & MISALIGNED:
            key = (*key, _alignment((x_at, weight_at, bias_at)))
        plan = dispatch.plans.get(key)
    except UNREADABLE:
        key = None
    if (
        plan is not None
        and eps.__class__ is float
        and 0.0 <= eps <= LARGEST_FP32
        and (weight_offset is ZERO or offset_fits(weight_offset, weight))
    ):
        ready = plan.prepared(m)
        launch, empty = ready.launch, plan.empty
        if launch is None or (save_mv and not packed):
            addresses, tensors = (x_at, weight_at, bias_at, 0, 0, 0), (x, weight, bias, None, None, None)
            if packed:
                return run_recorded(plan, addresses, tensors, shape, m, eps, weight_offset)
            return run(plan, addresses, tensors, shape, m, eps, weight_offset, None, None)
        if flat:
            y = empty((m, n), (n, 1), plan.y_dtype)
        else:
            size = tuple(shape)
            y = empty(size, contiguous_strides(size), plan.y_dtype)
        statistics = None
        mean_at = rstd_at = 0
        if packed:
            statistics, mean_at, rstd_at = pack(empty, m, plan.saves_mean)
        values = (
            x_at, weight_at, bias_at, 0, 0, 0, y.data_ptr(), 0, 0, mean_at, rstd_at, 0, m, eps, weight_offset,
        )  # fmt: skip
        launch(ready.grid(m), values)
        return make_output(LayerNormOutput, (y, None, None, None, statistics))
    if known_only:
        raise Unlike
    refuse_foreign(x=x, weight=weight, bias=bias)
    call = prepare(
        _NORMS[norm],
        resolved(x),
        resolved(weight),
        resolved(bias),
        eps=eps,
        weight_offset=weight_offset,
        save_mv=save_mv,
    )
    refuse_gradient(call)
    return _first(call, key, packed)


@eager_only
def forward_fused(
    norm: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    residual: torch.Tensor | None,
    fadd: str | int | FusedAdd,
    smooth_scale: torch.Tensor | None,
    fquant: str | int | FusedQuant,
    x_bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    scale_dtype: torch.dtype,
    save_mv: bool,
    rounding: str | Rounding,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    *,
    packed: bool = False,
    known_only: bool = False,
) -> LayerNormOutput:
    """Launch any forward call, as `forward_plain` does those with nothing fused."""
    key: Key | None = None
    plan: Plan | None = None
    addresses: tuple[int, ...]
    try:
        if x.__class__ not in PLAIN:
            raise Unlike
        shape, device = x.shape, x.device
        n = shape[-1]
        m = x.numel() // n
        x_at = x.data_ptr()
        x_kind = x.dtype if x.is_contiguous() else layout_of(x)
        weight_at, weight_kind = _ABSENT if weight is None else vector_of(weight, n, device)
        bias_at, bias_kind = _ABSENT if bias is None else vector_of(bias, n, device)
        x_bias_at, x_bias_kind = _ABSENT if x_bias is None else vector_of(x_bias, n, device)
        smooth_at, smooth_kind = _ABSENT if smooth_scale is None else vector_of(smooth_scale, n, device)
        residual_at, residual_kind = _ABSENT if residual is None else rows_of(residual, shape, device)
        out_at, out_kind = _ABSENT if out is None else rows_of(out, shape, device)
        sum_at, sum_kind = _ABSENT if residual_out is None else rows_of(residual_out, shape, device)
        if m == 0 or not x_at or x.is_neg():
            raise Unlike
        # Modes with their classes, because True is equal to 1, and 1.0 too.
        key = (
            norm, n, device,
            x_kind, weight_kind, bias_kind, x_bias_kind, smooth_kind, residual_kind, out_kind, sum_kind,
            fadd, fadd.__class__, fquant, fquant.__class__, save_mv, save_mv.__class__, rounding,
            out_dtype, scale_dtype,
        )  # fmt: skip
        addresses = (x_at, weight_at, bias_at, residual_at, smooth_at, x_bias_at)
        if (x_at | x_bias_at | residual_at | weight_at | bias_at | smooth_at | out_at | sum_at) & MISALIGNED:
            key = (*key, _alignment((*addresses, out_at, sum_at)))
        plan = dispatch.plans.get(key)
    except UNREADABLE:
        key = None
    if (
        plan is not None
        and eps.__class__ is float
        and 0.0 <= eps <= LARGEST_FP32
        and (weight_offset is ZERO or offset_fits(weight_offset, weight))
    ):
        tensors = (x, weight, bias, residual, smooth_scale, x_bias)
        if (
            known_only
            or not (forward_ad._current_level >= 0 or (torch.is_grad_enabled() and _any_requires_gradient(*tensors)))
        ) and (
            (out is None and residual_out is None) or may_write(plan.extents, addresses, tensors, m, out, residual_out)
        ):
            if packed:
                return run_recorded(plan, addresses, tensors, shape, m, eps, weight_offset)
            return run(plan, addresses, tensors, shape, m, eps, weight_offset, out, residual_out)
    if known_only:
        raise Unlike
    refuse_foreign(
        x=x,
        weight=weight,
        bias=bias,
        residual=residual,
        x_bias=x_bias,
        smooth_scale=smooth_scale,
        out=out,
        residual_out=residual_out,
    )
    call = prepare(
        _NORMS[norm],
        resolved(x),
        resolved(weight),
        resolved(bias),
        eps=eps,
        weight_offset=weight_offset,
        residual=resolved(residual),
        fadd=fadd,
        smooth_scale=resolved(smooth_scale),
        fquant=fquant,
        x_bias=resolved(x_bias),
        out_dtype=out_dtype,
        scale_dtype=scale_dtype,
        save_mv=save_mv,
        rounding=rounding,
        out=out,
        residual_out=residual_out,
    )
    refuse_gradient(call)
    return _first(call, key, packed)


def _first(call: Call, key: Key | None, packed: bool) -> LayerNormOutput:
    """Launch a call that `prepare` passed, and make those like it known."""
    require_device(call.x)
    plans = dispatch.plans
    tensors = tuple(getattr(call, row.name) for row in FORWARD.inputs)
    at = {row.slot: address_of(row.name, getattr(call, row.name)) for row in (*FORWARD.inputs, *FORWARD.places)}
    addresses = tuple(at.values())[: len(tensors)]
    plan = None if key is None else plans.get(key)
    if plan is None:
        plan = Plan(call, [slot for slot, address in at.items() if address & MISALIGNED])
        if key is not None:
            dispatch.remember(plans, key, plan)
    given = (plan, addresses, tensors, call.x.shape, call.m, call.eps, call.weight_offset)
    return run_recorded(*given) if packed else run(*given, call.out, call.residual_out)


def _alignment(addresses: tuple[int, ...]) -> tuple[bool, ...]:
    return tuple([not at & MISALIGNED for at in addresses])


def _any_requires_gradient(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    smooth_scale: torch.Tensor | None,
    x_bias: torch.Tensor | None,
) -> bool:
    # Written out, because a loop takes 0.15 us longer.
    return (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
        or (x_bias is not None and x_bias.requires_grad)
        or (smooth_scale is not None and smooth_scale.requires_grad)
    )
