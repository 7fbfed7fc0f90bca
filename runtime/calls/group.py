"""Calls of GroupNorm: laid out, launched, and recorded by autograd."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..codegen.groups import Activation, GroupMode
from ..codegen.model import Direction
from ..dtypes import DTYPES
from ..kernels.gpu import require_device
from ..kernels.key import ALIGNMENT
from ..upstream.torch_autograd import applied
from ..upstream.torch_dynamo import eager_only
from . import group_instead
from .group_instead import Gradients, Options
from .group_plan import BACKWARD, FORWARD, Kind, plan_of
from .traced import dispatch_modes, is_dynamo_compiling, operator

# y, and a mean and rstd of each group, (samples, groups) fp32.
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

FORWARD_OPERATOR, BACKWARD_OPERATOR = "group_norm", "group_norm_backward"


def are_channels_last(x: torch.Tensor) -> bool | None:
    """Whether channels are innermost in memory, or else positions; None of a tensor that is laid out otherwise."""
    if x.dim() == 2:
        return True if x.is_contiguous() else None
    if x.is_contiguous():
        return False
    return True if x.movedim(1, -1).is_contiguous() else None


def laid_out(x: torch.Tensor) -> torch.Tensor:
    """A tensor without gaps whose channels or positions are innermost: the very one, or a copy of its kind."""
    if are_channels_last(x) is not None:
        return x
    if x.dim() > 2 and x.stride(1) == 1 and x.shape[1] > 1:
        return _with_channels(x, last=True)
    return x.contiguous()


def _with_channels(x: torch.Tensor, *, last: bool | None) -> torch.Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last and x.dim() > 2 else x.contiguous()


def _vector(vector: torch.Tensor | None) -> torch.Tensor | None:
    return None if vector is None else vector.detach().contiguous().resolve_neg()


@eager_only
def launched(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, options: Options, *, saves: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """A checked call of a tensor that is laid out; a mean and rstd of each group if it `saves` them."""
    require_device(x)
    x = x.detach().resolve_neg()
    samples, groups = x.shape[0], options.num_groups
    y = torch.empty_strided(x.shape, x.stride(), dtype=options.out_dtype or x.dtype, device=x.device)
    mean, rstd = (x.new_zeros((samples, groups), dtype=torch.float32) if saves else None for _ in range(2))
    if x.numel():
        tensors = {"x": x, "weight": _vector(weight), "bias": _vector(bias), "y": y, "mean": mean, "rstd": rstd}
        mode = _mode(x, Direction.FORWARD, options)
        plan_of(_kind(mode, x, options, FORWARD, tensors), x.device).launch(samples, tensors, options.eps)
    return y, mean, rstd


@eager_only
def launched_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    statistics: tuple[torch.Tensor, torch.Tensor],
    options: Options,
    wants: Collection[str],
) -> Gradients:
    """The gradients that are wanted, by kernels; dy is copied where it does not lie as x does."""
    require_device(x)
    x = x.detach().resolve_neg()
    dy = _with_channels(dy.detach(), last=are_channels_last(x)).resolve_neg()
    vectors = {"dweight": weight, "dbias": bias}
    due = {name: vector for name, vector in vectors.items() if vector is not None and name in wants}
    if not x.numel():
        found = {name: torch.zeros_like(vector) for name, vector in due.items()}
        return Gradients(torch.empty_like(x) if "dx" in wants else None, found.get("dweight"), found.get("dbias"))
    mean, rstd = statistics
    dx = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    tensors = {
        "dy": dy,
        "x": x,
        "weight": _vector(weight),
        "bias": _vector(bias) if options.activation != "none" else None,
        "mean": mean,
        "rstd": rstd,
        "dx": dx,
    }
    mode = _mode(x, Direction.BACKWARD, options)
    kind = _kind(mode, x, options, BACKWARD, {**tensors, **dict.fromkeys(due, mean)})
    plan, samples = plan_of(kind, x.device), x.shape[0]
    rows = plan.sums_rows(samples)
    partials = {name: x.new_empty((rows, x.shape[1]), dtype=torch.float32) for name in due}
    plan.launch(samples, {**tensors, **partials}, 0.0)
    found = {name: torch.empty_like(vector, memory_format=torch.contiguous_format) for name, vector in due.items()}
    if due:
        plan.finish(rows, partials, found)
    return Gradients(dx if "dx" in wants else None, found.get("dweight"), found.get("dbias"))


def _mode(x: torch.Tensor, direction: Direction, options: Options) -> GroupMode:
    return GroupMode(DTYPES[x.dtype], direction, Activation(options.activation), bool(are_channels_last(x)))


def _kind(
    mode: GroupMode,
    x: torch.Tensor,
    options: Options,
    names: tuple[str, ...],
    tensors: Mapping[str, torch.Tensor | None],
) -> Kind:
    found = [tensors.get(name) for name in names]
    misaligned = [
        f"{name}_ptr"
        for name, tensor in zip(names, found, strict=True)
        if tensor is not None and tensor.data_ptr() % ALIGNMENT
    ]
    channels = x.shape[1]
    positions = x.numel() // (x.shape[0] * channels)
    dtypes = tuple([None if tensor is None else tensor.dtype for tensor in found])
    return Kind(mode, channels, options.num_groups, positions, dtypes, frozenset(misaligned))


def normalise(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, options: Options
) -> torch.Tensor:
    """A checked call: by kernels, recorded where a gradient is due."""
    x = laid_out(x)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)):
        recorded: torch.Tensor = _recorded(options, x, weight, bias)
        return recorded
    return launched(x, weight, bias, options, saves=False)[0]


def normalise_traced(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, options: Options
) -> torch.Tensor:
    """The same as one operator, and the copy before it."""
    saves = torch.is_grad_enabled() and any(
        # A proxy of torch.fx is neither true nor false.
        getattr(tensor, "requires_grad", False) is True
        for tensor in (x, weight, bias)
    )
    found: list[torch.Tensor] = operator(FORWARD_OPERATOR)(laid_out(x), weight, bias, *options, saves)
    return found[0]


def operated_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    statistics: tuple[torch.Tensor, torch.Tensor],
    options: Options,
    wants: Collection[str],
) -> Gradients:
    """The gradients that are wanted, as one operator."""
    vectors = {"dweight": weight, "dbias": bias}
    asked = [name for name in wants if name == "dx" or vectors[name] is not None]
    num_groups, eps, activation, _ = options
    told = (num_groups, eps, activation, asked)
    found = dict(zip(asked, operator(BACKWARD_OPERATOR)(dy, x, weight, bias, *statistics, *told), strict=True))
    return Gradients(*[found.get(name) for name in Gradients._fields])


class _GroupNorm(torch.autograd.Function):
    """y; kept for the backward pass are its operands, and a mean and rstd a group."""

    @staticmethod
    def forward(
        ctx: Any, options: Options, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        y, mean, rstd = launched(x, weight, bias, options, saves=True)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        x, weight, bias, mean, rstd = ctx.saved_tensors
        wants = [name for name, due in zip(Gradients._fields, ctx.needs_input_grad[1:], strict=True) if due]
        return None, *gradients_of(dy, x, weight, bias, (mean, rstd), ctx.options, wants)


def gradients_of(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    statistics: tuple[torch.Tensor, torch.Tensor],
    options: Options,
    wants: Collection[str],
) -> Gradients:
    """The gradients that are wanted: by kernels, unless a gradient of them could be asked for, or somebody looks on."""
    seen = torch.is_grad_enabled() or is_dynamo_compiling() or dispatch_modes() > 0
    compute = group_instead.gradients if seen else launched_backward
    return compute(dy, x, weight, bias, statistics, options, wants)


_recorded = applied(_GroupNorm)
