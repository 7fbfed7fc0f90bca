"""Normalise rows that are split over ranks: the ranks exchange a few numbers per row, not the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..calls.check import check_dtype, check_number, check_tensor
from ..dtypes import FLOATS
from ..errors import DeviceError, GradientError, LayoutError, ShapeError
from ..selection.invariance import refuse_torch
from ..upstream.torch_dtensor import assembled

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def split_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """LayerNorm of rows that are split over the ranks of a group, with one all-reduce forward and one backward.

    Forward, each rank's mean, sum of squared deviations M2 and count of its part of a row are merged by the formula of
    Chan, Golub and LeVeque ("Algorithms for Computing the Sample Variance: Analysis and Recommendations", 1983), here
    of any number of parts at once: mean = sum(n_i mean_i) / n, M2 = sum(M2_i) + sum(n_i (mean_i - mean)**2). In the
    all-reduce every rank has a place of its own, three fp32 numbers a row (the mean is two of them), so that rows far
    from zero are as accurate as in one piece. Were squares of means summed there, less would be sent, and of rows of
    10000 plus noise of 0.01 an error of 1e-4 would be left even in fp64. Backward, two fp32 sums a row are all-reduced.

    It runs as operators of torch, in fp32, on any device; torch.compile fuses them. Kept for the backward pass are the
    part of x, and a mean (fp64) and rstd a row. Gradients of weight and bias need no communication. Differentiable
    once.

    Args:
        x: a rank's part of rows that are consecutive over the ranks, (..., its share of N), fp16, bf16, fp32 or fp64;
            parts may differ in length, and have no element. Or a DTensor whose last dimension is sharded over one
            dimension of its mesh; others may shard leading dimensions.
        weight: x's last dimension: the part of it that goes with the part of rows. Of a DTensor x a DTensor of (N,);
            it is redistributed to lie as x's last dimension does, and its gradient back, unless it does. None is 1.
        bias: the part of the bias, as `weight`; None is 0.
        eps: added to the variance.
        group: of plain tensors, the ranks that rows are split over; None is the default group. Of DTensors x says it.

    Returns:
        y: x's shape and dtype, split as x is.

    Raises:
        DeviceError: some of x, weight and bias are DTensors and others are not, or they are on several meshes; or this
            rank is not in the group.
        LayoutError: x is a DTensor and a partial sum, or its last dimension is not sharded over one of the mesh's.
        ShapeError: weight or bias is not of x's last dimension, or x has none.
        DTypeError: a tensor is of no floating-point type, or an argument is no tensor.
        ConflictError: eps is no number of at least 0.
        GradientError: the gradient is differentiated; raised by that backward pass.
    """
    return _split(_Options(check_number("eps", eps, least=0.0), True, group), x, weight, bias)


def split_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """RMSNorm of rows that are split over the ranks of a group, with one all-reduce forward and one backward.

    Forward, each rank's sum of squares and count are summed, backward one sum: a number a row each, in fp32.
    Everything else is as in `split_layer_norm`.

    Args:
        x: see `split_layer_norm`.
        weight: see `split_layer_norm`.
        eps: added to the mean square; None is torch.finfo(torch.float32).eps, as in `normforge.rms_norm`.
        group: see `split_layer_norm`.

    Returns:
        y: x's shape and dtype, split as x is.

    Raises:
        NormforgeError: one of those that `split_layer_norm` lists.
    """
    added = torch.finfo(torch.float32).eps if eps is None else check_number("eps", eps, least=0.0)
    return _split(_Options(added, False, group), x, weight)


class _Options(NamedTuple):
    """The arguments of a call that are not tensors."""

    eps: float
    centres: bool
    group: Any


def _split(
    options: _Options, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    vectors = {"weight": weight, "bias": bias}
    operands: dict[str, Any] = {"x": x, **{name: each for name, each in vectors.items() if each is not None}}
    for name, tensor in operands.items():
        check_dtype(name, check_tensor(name, tensor), (*FLOATS, torch.float64))
    if x.dim() == 0:
        raise ShapeError("x has no dimension; it takes (..., a share of N)")
    n = tuple(x.shape[-1:])
    for name, tensor in operands.items():
        if name != "x" and tuple(tensor.shape) != n:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it takes {n}, x's last")
    sharded = [name for name, tensor in operands.items() if isinstance(tensor, DTensor)]
    if not sharded:
        if dist.get_rank(options.group) < 0:
            raise DeviceError(
                "this rank is not in the group that rows are split over; call the norm on its ranks alone"
            )
        return _normalise(options, x, weight, bias)
    for name, tensor in operands.items():
        if not isinstance(tensor, DTensor):
            raise DeviceError(f"{name} is a plain tensor and {sharded[0]} a DTensor; pass DTensors alone, or parts")
        if tensor.device_mesh != operands["x"].device_mesh:
            raise DeviceError(f"{name} is on another mesh than x; redistribute one to the other's")
    return _of_dtensors(options, x, weight, bias)


def _of_dtensors(options: _Options, x: Any, *vectors: Any) -> torch.Tensor:
    last = x.dim() - 1
    over = [at for at, placement in enumerate(x.placements) if placement == Shard(last)]
    if len(over) != 1 or any(placement.is_partial() for placement in x.placements):
        raise LayoutError(
            f"x has placements {x.placements} and rows are split over one dimension of the mesh, Shard({last}); "
            "redistribute x, or call normforge.layer_norm or rms_norm for whole rows"
        )
    as_columns: list[Placement] = [Replicate() for _ in x.placements]
    # A vector's gradient is summed over rows, wherever those are sharded.
    of_sums: list[Placement] = [Replicate() if placement.is_replicate() else Partial() for placement in x.placements]
    as_columns[over[0]] = of_sums[over[0]] = Shard(0)
    parts = []
    for vector in vectors:
        # Redistributing to the same placements would redistribute the gradient too.
        if vector is not None and vector.placements != tuple(as_columns):
            vector = vector.redistribute(placements=as_columns)
        parts.append(None if vector is None else vector.to_local(grad_placements=of_sums))
    options = options._replace(group=x.device_mesh.get_group(over[0]))
    part = x.to_local(grad_placements=x.placements)
    return assembled(_normalise(options, part, *parts), x, x.shape, x.placements)


class _Normalise(torch.autograd.Function):
    """A rank's part of y."""

    @staticmethod
    def forward(
        ctx: Any, options: _Options, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        refuse_torch(f"a norm of rows of {x.dtype} split over ranks")
        wide = _wide(x)
        mean, rstd, count = _merged(wide, options)
        h = _normalised(wide, mean, rstd)
        y = h if weight is None else h * weight.to(h.dtype)
        ctx.group, ctx.bias_dtype = options.group, None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight, mean, rstd, count)
        y = y if bias is None else y + bias.to(h.dtype)
        # TorchDynamo of torch 2.11 has no gradient pass a conversion that converts nothing at a function's end.
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Recorded only where a second derivative could be requested.
        compute = _Gradients.apply if torch.is_grad_enabled() else _gradients
        return None, *compute(ctx.group, ctx.bias_dtype, ctx.needs_input_grad[1:], dy, *ctx.saved_tensors)


# Torch declares no types for apply.
_normalise: Callable[..., torch.Tensor] = _Normalise.apply


class _Gradients(torch.autograd.Function):
    """The backward pass as a function of its own, so that differentiating it is an error rather than a zero."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
        return _gradients(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        raise GradientError(
            "a gradient of normforge's gradient was asked (a double backward) and no kernel computes it; "
            "use torch.nn.functional's norm there, or normforge.unpatch(model)"
        )


def _gradients(
    group: ProcessGroup | None,
    bias_dtype: torch.dtype,
    due: tuple[bool, ...],
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    count: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    (for_x, for_weight, for_bias), wide, centres = due, _wide(x), mean is not None
    h, dy = _normalised(wide, mean, rstd), dy.to(wide.dtype)
    dx = None
    if for_x:
        g = dy if weight is None else dy * weight.to(wide.dtype)
        sums = torch.stack([(g * h).sum(-1), *([g.sum(-1)] if centres else [])])
        dist.all_reduce(sums, group=group)
        means = (sums / count.to(sums.dtype)).unsqueeze(-1)
        dx = g - h * means[0]
        dx = ((dx - means[1] if centres else dx) * rstd).to(x.dtype)
    return (
        dx,
        (dy * h).sum_to_size(x.shape[-1:]).to(weight.dtype) if for_weight and weight is not None else None,
        dy.sum_to_size(x.shape[-1:]).to(bias_dtype) if for_bias else None,
    )


def _merged(x: torch.Tensor, options: _Options) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return the mean (fp64; None for RMSNorm) and rstd of whole rows, both (..., 1), and the length of a row."""
    rows, n = x.shape[:-1], x.shape[-1]
    if not options.centres:
        packed = torch.cat([x.square().sum(-1).flatten(), x.new_full((1,), n)])
        dist.all_reduce(packed, group=options.group)
        mean_square = packed[:-1] / packed[-1]
        return None, (mean_square + options.eps).rsqrt().view(*rows, 1), packed[-1]
    # Two passes, the second corrected by what the mean lost when it was rounded (the same paper's (1.7)).
    near = x.mean(-1) if n else x.new_zeros(rows)
    off = x - near.unsqueeze(-1)
    lost = off.mean(-1) if n else near
    m2 = off.square().sum(-1) - n * lost.square()
    mine = torch.cat([near.flatten(), lost.flatten(), m2.flatten(), x.new_full((1,), n)])
    # Each rank fills one row; the other ranks add zeros to that row.
    parts = mine.new_zeros(dist.get_world_size(options.group), mine.numel())
    parts[dist.get_rank(options.group)] = mine
    dist.all_reduce(parts, group=options.group)
    parts = parts.double()
    counts, (nears, losses, m2s) = parts[:, -1:], parts[:, :-1].view(len(parts), 3, near.numel()).unbind(1)
    count, means = counts.sum(), nears + losses
    mean = (counts * means).sum(0) / count
    variance = (m2s + counts * (means - mean).square()).sum(0) / count
    rstd = (variance + options.eps).rsqrt().to(x.dtype)
    return mean.view(*rows, 1), rstd.view(*rows, 1), count


def _normalised(x: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor) -> torch.Tensor:
    if mean is None:
        return x * rstd
    # For rows far from zero, rounding the mean to x's dtype loses as much as the deviations of the row.
    near = mean.to(x.dtype)
    return (x - near - (mean - near).to(x.dtype)) * rstd


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
