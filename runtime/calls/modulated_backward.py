"""The backward pass of modulated norms by kernels: the gradients of rows, and what each sample's rows add up to.

Within a sample the scale is one: with h the normalised rows, `sum(dy * h)` and `sum(dy)` over its rows are all that the
gradients of scale, shift, weight and bias are made of, by operations on a row a sample. Programs each take rows of one
sample and leave sums of their own, which are added up in a fixed order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from operator import is_, or_
from typing import Any, NamedTuple

import torch

from ..call_kinds import LEAST_ROWS_OF_SAMPLE, MOST_SAMPLES
from ..codegen.model import Mode
from ..codegen.values import Direction, FusedAdd, Norm
from ..dtypes import DTYPES
from ..selection import dispatch, invariance
from ..upstream.torch_allocator import contiguous_strides
from ..upstream.torch_dynamo import eager_only
from .canonical import in_place_of
from .known import MISALIGNED, Key, Known, remember
from .modulated_instead import Kept, Told
from .outputs import dtype_of_all, rstd_address, unpacked
from .row_gradients import (
    GradientPlan,
    Kind,
    Layout,
    Tensors,
    addresses_of,
    in_memory,
    kind_of,
    plan_of,
    shared_sum,
    sum_dtype,
)
from .row_layout import row_stride, walkable

# Sums are sum(dy * h), sum(dy) and the gate's gradient.
TENSORS = Tensors(
    names=("dy", "x", "weight", "scale", "gate", "gated", "mean", "rstd", "dresidual_out", "dx", "dgated"),
    with_rows=("dy", "x", "scale", "gate", "gated", "dresidual_out", "dx", "dgated"),
    read=("dy", "x", "gated", "dresidual_out"),
    sums=("dweight", "dbias", "dgate"),
    shared="sample_rows",
)


def mode_of(norm: Norm, dtype: torch.dtype, adds: bool, gates: bool) -> Mode:
    """The mode of the kernels for rows of a type, with a gradient of the sum or not, gated or not."""
    fadd = FusedAdd.PRE_ADD_STORE if adds else FusedAdd.NONE
    own = DTYPES[dtype]
    return Mode(norm, own, own, fadd, direction=Direction.BACKWARD, modulated=True, x_gate=gates)


def stand_in(
    mode: Mode,
    n: int,
    own: torch.dtype,
    dtypes: Mapping[str, torch.dtype | None],
    misaligned: Collection[str],
) -> Kind:
    """What launches are alike in whose rows adjoin, whose tensors are of a type of their own, and that sum all."""
    single = torch.float32
    found = {
        **dict.fromkeys(TENSORS.names, own),
        "mean": single if mode.norm.centres else None,
        "rstd": single,
        **dtypes,
    }
    for name, there in (("gate", mode.x_gate), ("gated", mode.x_gate), ("dresidual_out", mode.fadd.stores)):
        found[name] = own if there else None
    found["dgated"] = found["gated"]
    # Without a weight, sums are the gradients of what samples have.
    summed = single if found["weight"] is not None else own
    left = {"dweight": summed, "dbias": summed, "dgate": own if mode.x_gate else None}
    strides = tuple([0 if found[name] is None else n for name in TENSORS.with_rows])
    types = (*[found[name] for name in TENSORS.names], *[left[name] for name in TENSORS.sums])
    return Kind(mode, TENSORS, n, types, strides, frozenset(misaligned))


def rows_a_sample(kept: Kept) -> int:
    """How many rows share a row of every modulation: those of a sample, or all."""
    rows = kept.rows
    m = rows.numel() // rows.shape[-1]
    least = m
    for operand in (kept.scale, kept.shift, kept.gate):
        if operand is not None and operand.dim() > 1:
            least = min(least, 1 if operand.shape == rows.shape else m // operand.shape[0])
    return least


def takes(kept: Kept, *arrived: torch.Tensor | None) -> bool:
    """Whether kernels compute the gradients of a call: of tensors in memory, and of several rows a sample."""
    if not in_memory((*kept, *arrived)) or kept.rows.numel() == 0:
        return False
    each = rows_a_sample(kept)
    return each >= LEAST_ROWS_OF_SAMPLE and kept.rows.numel() // kept.rows.shape[-1] // each <= MOST_SAMPLES


# How to make a tensor: size, strides and dtype; None for one that is not due.
_Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Ready(NamedTuple):
    """What calls come to whose tensors are like those of one that was checked, all but where they lie.

    Attributes:
        plan: the kernels.
        layout: how they are launched.
        m: rows.
        samples: how many parts they are in.
        dx: of what is normalised.
        dgated: of x, where there is a gate.
        totals: of the gradients that sums are, in the order of the sums.
        saves_mean: whether there are means.
    """

    plan: GradientPlan
    layout: Layout
    m: int
    samples: int
    dx: _Made | None
    dgated: _Made | None
    totals: tuple[_Made | None, ...]
    saves_mean: bool


# dy and the gradient of the sum, what a forward pass keeps, and statistics.
Arrived = tuple["torch.Tensor | None", ...]


@eager_only
def gradients_known(
    arrived: Arrived, told: Told, due: tuple[bool, ...]
) -> tuple[Key, list[torch.Tensor | None] | None]:
    """What `gradients` returns of tensors that are like those of a call before; None if there was none.

    Returns:
        What such a call is known by, and the gradients.
    """
    # What else may be there or not follows from which types were told.
    key = ("modulated bwd", told, due, arrived[1] is None)
    kind: Known
    for kind in dispatch.plans.get(key, ()):
        if kind.fits(*kind.present(arrived)):
            addresses = addresses_of(arrived)
            aligned = not reduce(or_, addresses) & MISALIGNED
            ready: Ready | None = kind.plan if aligned else kind.plan_at(*addresses)
            return key, None if ready is None else _launched(ready, arrived, addresses, told.weight_offset, due)
    return key, None


def _launched(
    ready: Ready, arrived: Arrived, addresses: Sequence[int], weight_offset: float, due: Sequence[bool]
) -> list[torch.Tensor | None]:
    plan, layout, m, samples, dx_made, dgated_made, totals_made, saves_mean = ready
    empty = plan.empty
    dx = None if dx_made is None else empty(*dx_made)
    dgated = None if dgated_made is None else empty(*dgated_made)
    totals = [None if made is None else empty(*made) for made in totals_made]
    values: Sequence[Any]
    if layout.by_address:
        dy, dresidual_out, rows, scale, _, gate, gated, weight, _, statistics = addresses
        mean, rstd = (statistics, rstd_address(statistics, m)) if saves_mean else (0, statistics)
        made = (0 if dx is None else dx.data_ptr(), 0 if dgated is None else dgated.data_ptr())
        values = (dy, rows, weight, scale, gate, gated, mean, rstd, dresidual_out, *made)
    else:
        given = dict(zip(_ARRIVED, arrived, strict=True))
        packed = given.pop("statistics")
        assert packed is not None
        given["mean"], given["rstd"] = unpacked(packed, m)
        given |= {"dx": dx, "dgated": dgated}
        values = [given[name] for name in TENSORS.names]
    plan.run(layout, m, m // samples, values, totals, weight_offset)
    for_x, *_, for_residual, _, _ = due
    of_x = dx if dgated is None else dgated
    return [of_x if for_x else None, *totals, dx if for_residual else None, None, None]


# Named as kernels name them.
_ARRIVED = ("dy", "dresidual_out", "x", "scale", "shift", "gate", "gated", "weight", "bias", "statistics")


@eager_only
def gradients(
    kept: Kept,
    told: Told,
    dy: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    due: Sequence[bool],
    learnt: tuple[Key, Arrived] | None = None,
) -> list[torch.Tensor | None]:
    """What `modulated_instead.gradients` returns of the same arguments, where `takes` has passed them.

    Args:
        kept: what the forward pass kept.
        told: see `modulated_instead.gradients`.
        dy: the gradient of y.
        dresidual_out: that of the sum; None if none arrived.
        due: which gradients are.
        learnt: from `gradients_known`, to which calls like this one become known; None has them stay unknown.
    """
    # Of another table, which may be loaded meanwhile, nothing is to be known.
    plans = dispatch.plans
    for_x, *_, for_residual, _, _ = due
    on_one_stride = (_on_one_stride(dy), _on_one_stride(dresidual_out))
    if learnt is not None and not all(map(is_, on_one_stride, (dy, dresidual_out))):
        # Copies may be like the gradients of a call before.
        arrived = (*on_one_stride, *learnt[1][2:])
        key, known = gradients_known(arrived, told, tuple(due))
        if known is not None:
            return known
        learnt = key, arrived
    dy, dresidual_out = on_one_stride
    rows, n = kept.rows, kept.rows.shape[-1]
    m = rows.numel() // n
    samples = m // rows_a_sample(kept)
    x_dtype, *_, residual_dtype, _, _ = told.dtypes
    gates = kept.gate is not None
    of_sum = [(x_dtype, for_x and not gates), (residual_dtype, for_residual)]
    summed = [dtype for dtype, needed in of_sum if needed and dtype is not None]
    tensors: dict[str, torch.Tensor | None] = {
        "dy": dy,
        "x": _on_one_stride(rows),
        "weight": kept.weight,
        "scale": _of_samples(kept.scale, samples),
        "gate": None if kept.gate is None else _of_samples(kept.gate, samples),
        "gated": _on_one_stride(kept.gated),
        "mean": kept.mean,
        "rstd": kept.rstd,
        "dresidual_out": dresidual_out,
        "dx": rows.new_empty(rows.shape, dtype=dtype_of_all(summed)) if summed else None,
        "dgated": rows.new_empty(rows.shape, dtype=x_dtype) if gates and for_x else None,
    }
    tensors = in_place_of(tensors, n, TENSORS.with_rows)
    strides = {name: _stride(tensors[name], samples if name in ("scale", "gate") else m) for name in TENSORS.with_rows}
    mode = mode_of(Norm(told.norm), rows.dtype, dresidual_out is not None, gates)
    plan = plan_of(kind_of(mode, TENSORS, n, tensors, strides, _sums(kept, samples, due)), rows.device)
    totals = plan.launch(m, samples, m // samples, tensors, told.weight_offset)
    found = _of_samples_sums(kept, told, totals, due)
    found[0] = tensors["dgated"] if gates else tensors["dx"]
    found[4] = tensors["dx"]
    if learnt is not None:
        ready = _ready(plan, m, samples, kept, told, tensors, totals, due)
        rows_as_passed = (dy, rows, kept.gated, dresidual_out)
        if ready is not None and all(map(is_, rows_as_passed, map(tensors.get, ("dy", "x", "gated", "dresidual_out")))):
            key, arrived = learnt
            # Another M is another kind: all sizes are settled.
            remember(plans, key, arrived, [0] * len(arrived), tuple(addresses_of(arrived)), ready)
    return [
        gradient.to(dtype) if needed and gradient is not None and dtype is not None else None
        for gradient, dtype, needed in zip(found, told.dtypes, due, strict=True)
    ]


def _ready(
    plan: GradientPlan,
    m: int,
    samples: int,
    kept: Kept,
    told: Told,
    tensors: Mapping[str, torch.Tensor | None],
    totals: Mapping[str, torch.Tensor],
    due: Sequence[bool],
) -> Ready | None:
    """What calls like this one come to, None if kernels do not leave the very gradients that are due."""
    for_x, *_, for_residual, _, _ = due
    x_dtype, *_, residual_dtype, _, _ = told.dtypes
    dx, dgated = tensors["dx"], tensors["dgated"]
    of_rows = [(dx if dgated is None else dgated, x_dtype, for_x), (dx, residual_dtype, for_residual)]
    operands = (kept.scale, kept.shift, kept.gate)
    found = tuple([totals.get(name) for name in TENSORS.sums])
    if kept.weight is not None or kept.bias is not None or invariance.is_on():
        return None
    if any(needed and made is not None and made.dtype is not dtype for made, dtype, needed in of_rows):
        return None
    for total, operand in zip(found, operands, strict=True):
        if (
            total is not None
            and operand is not None
            and (total.numel() != operand.numel() or total.dtype is not operand.dtype)
        ):
            return None
    sums = [
        None if total is None or operand is None else _made(operand.shape, total.dtype)
        for total, operand in zip(found, operands, strict=True)
    ]
    of_dx, of_dgated = (None if each is None else _made(each.shape, each.dtype) for each in (dx, dgated))
    return Ready(plan, plan.layout(m, samples), m, samples, of_dx, of_dgated, tuple(sums), kept.mean is not None)


def _made(shape: torch.Size, dtype: torch.dtype) -> _Made:
    size = tuple(shape)
    return size, contiguous_strides(size), dtype


def _sums(kept: Kept, samples: int, due: Sequence[bool]) -> dict[str, torch.dtype]:
    """Which sums are needed, and in which type: the gradient's that one is, or fp32 if there is more to be done."""
    _, for_scale, for_shift, for_gate, _, for_weight, for_bias = due
    affine = kept.weight is not None or kept.bias is not None
    found = {}
    if for_scale or for_weight:
        found["dweight"] = torch.float32 if affine else sum_dtype(kept.scale, samples)
    if for_shift or for_bias or (for_scale and kept.bias is not None):
        found["dbias"] = torch.float32 if affine else sum_dtype(kept.shift, samples)
    if for_gate and kept.gate is not None:
        found["dgate"] = sum_dtype(kept.gate, samples)
    return found


def _of_samples_sums(
    kept: Kept, told: Told, totals: Mapping[str, torch.Tensor], due: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradients of what samples or all rows share, from what each sample's rows add up to: `_sums`."""
    _, for_scale, for_shift, for_gate, _, for_weight, for_bias = due
    found: list[torch.Tensor | None] = [None] * len(due)
    dy_h, dy = totals.get("dweight"), totals.get("dbias")
    if for_scale and dy_h is not None:
        dscale = dy_h if kept.weight is None else dy_h * (kept.weight.float() + told.weight_offset)
        if kept.bias is not None and dy is not None:
            dscale = dscale + dy * kept.bias.float()
        found[1] = shared_sum(dscale, kept.scale)
    if for_shift and dy is not None:
        found[2] = shared_sum(dy, kept.shift)
    if for_gate and kept.gate is not None:
        found[3] = shared_sum(totals["dgate"], kept.gate)
    if for_weight and dy_h is not None:
        found[5] = (dy_h * (1 + kept.scale.float())).sum(0)
    if for_bias and dy is not None:
        found[6] = (dy * (1 + kept.scale.float())).sum(0)
    return found


def _of_samples(operand: torch.Tensor, samples: int) -> torch.Tensor:
    return operand.expand(samples, -1) if operand.dim() == 1 else operand


def _on_one_stride(rows: torch.Tensor | None) -> torch.Tensor | None:
    if rows is None:
        return None
    rows = walkable(rows)
    # A sample's rows start at a multiple of it.
    return rows if isinstance(row_stride("rows", rows), int) else rows.contiguous()


def _stride(tensor: torch.Tensor | None, count: int) -> int:
    if tensor is None:
        return 0
    stride = row_stride("rows", tensor) if count > 1 else tensor.shape[-1]
    assert isinstance(stride, int)
    return stride
