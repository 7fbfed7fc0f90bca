"""GroupNorm by torch's operators, forward and backward: where no kernel runs, and for gradients of gradients."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch.nn import functional

from ..selection.invariance import refuse_torch
from . import torch_instead
from .traced import unrecorded


class Options(NamedTuple):
    """What a call is told besides tensors.

    Attributes:
        num_groups: groups of a sample.
        eps: added to the variance.
        activation: the word of `codegen.groups.Activation`.
        out_dtype: y's; None is x's.
    """

    num_groups: int
    eps: float
    activation: str
    out_dtype: torch.dtype | None


class Arrived(NamedTuple):
    """A backward call.

    Attributes:
        dy: the gradient that arrives, of x's shape.
        x: what was normalised.
        weight: (C,), or None.
        bias: likewise.
        statistics: a mean and rstd of each group, (2, samples, groups), fp32.
        options: what the forward call was told.
        wants: the names of `Gradients` that are asked for.
    """

    dy: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    statistics: torch.Tensor
    options: Options
    wants: Collection[str]


class Gradients(NamedTuple):
    """The gradients of a call's tensors; None of what was not asked for."""

    dx: torch.Tensor | None
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None


def normalise(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, options: Options
) -> torch.Tensor:
    """What `group.normalise` returns of the same arguments."""
    with unrecorded():
        has_memory = x.device.type != "meta" and 0 not in x.shape
    if has_memory:
        refuse_torch(f"a GroupNorm of {x.dtype} on {x.device}")
    if weight is None and bias is not None:
        # Without a weight torch computes no gradient of its bias, and its process may crash (2.13, on a CPU).
        weight = torch.ones_like(bias, requires_grad=False)
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if len(dtypes) == 1 and options.activation == "none" and options.out_dtype in (None, x.dtype):
        return torch.group_norm(x, options.num_groups, weight, bias, options.eps)
    # What is applied behind the norm is rounded once, with it.
    wide = torch_instead.widened(x)
    weight, bias = (None if vector is None else vector.to(wide.dtype) for vector in (weight, bias))
    y = torch.group_norm(wide, options.num_groups, weight, bias, options.eps)
    if options.activation == "silu":
        y = functional.silu(y)
    return y.to(options.out_dtype or x.dtype)


def gradients(arrived: Arrived) -> Gradients:
    """What a backward call returns, differentiable."""
    dy, x, weight, bias, statistics, options, wants = arrived
    # Of a group's elements side by side.
    s = torch_instead.widened(x).reshape(x.shape[0], options.num_groups, -1)
    mean, rstd = (statistic.to(s.dtype).unsqueeze(-1) for statistic in statistics)
    if torch.is_grad_enabled() and s.requires_grad:
        centre, rstd = torch_instead.depending(s, mean, rstd)
        assert centre is not None
        mean = centre
    h = (s - mean) * rstd
    dz = dy.to(s.dtype)
    if options.activation == "silu":
        z = _beside(weight, x) * h.reshape(x.shape) + _beside(bias, x, 0.0)
        sigmoid = torch.sigmoid(z)
        dz = dz * sigmoid * (1 + z * (1 - sigmoid))
    g = (dz * _beside(weight, x)).reshape(s.shape)
    dx = torch_instead.through_rows(g, h, rstd, True, None).reshape(x.shape)
    over = tuple([dim for dim in range(x.dim()) if dim != 1])
    dweight = (dz * h.reshape(x.shape)).sum(over) if "dweight" in wants and weight is not None else None
    dbias = dz.sum(over) if "dbias" in wants and bias is not None else None
    return Gradients(
        dx.to(x.dtype) if "dx" in wants else None,
        None if dweight is None or weight is None else dweight.to(weight.dtype),
        None if dbias is None or bias is None else dbias.to(bias.dtype),
    )


def _beside(vector: torch.Tensor | None, x: torch.Tensor, absent: float = 1.0) -> torch.Tensor | float:
    """A vector of channels in the type of arithmetic, of a shape that broadcasts to x's."""
    return absent if vector is None else torch_instead.widened(vector).reshape(-1, *[1] * (x.dim() - 2))
