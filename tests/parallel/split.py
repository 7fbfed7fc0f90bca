"""Cases of rows that are split over ranks; a norm of whole rows is what is expected."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import normforge
from normforge import errors
from normforge.parallel import split_layer_norm, split_rms_norm

from .ranks import DEVICE, Cases
from .sharded import alike, communicates, mesh, placed, refused, same

CASES = Cases()
M, N = 5, 48


def whole(layer: bool, x: torch.Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> torch.Tensor:
    """What is expected, in fp64."""
    x, weight, bias = x.double(), *(None if each is None else each.double() for each in (weight, bias))
    if layer:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def parts_of(tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """This rank's share of the last dimension."""
    parts: tuple[torch.Tensor, ...] = torch.split(tensor, sizes, -1)
    return parts[dist.get_rank()].detach().clone()


def split(layer: bool, x: torch.Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> torch.Tensor:
    """The same of a rank's part."""
    return split_layer_norm(x, weight, bias, eps) if layer else split_rms_norm(x, weight, eps)


def uneven() -> list[int]:
    """Shares of N: the last rank has more, and of a larger group the first has nothing."""
    world = dist.get_world_size()
    sizes = [N // world - 2] * (world - 1)
    sizes = [0, *sizes[1:]] if world > 2 else sizes
    return [*sizes, N - sum(sizes)]


@CASES.case
def parts_forward_and_backward() -> None:
    """One all-reduce each, whatever the dtype, of parts of several lengths."""
    for layer in (True, False):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float64, 1e-11)):
            x, dy = torch.randn(M, 2, N, dtype=dtype), torch.randn(M, 2, N, dtype=dtype)
            weight, bias = torch.randn(N, dtype=dtype), torch.randn(N, dtype=dtype) if layer else None
            leaves: Any = [each.double().requires_grad_() for each in (x, weight, bias) if each is not None]
            y = whole(layer, *leaves)
            gradients = torch.autograd.grad(y, leaves, dy.double())
            mine: Any = [parts_of(each, uneven()).requires_grad_() for each in (x, weight, bias) if each is not None]
            with communicates(allreduce=1):
                found = split(layer, *mine)
            with communicates(allreduce=1):
                back = torch.autograd.grad(found, mine, parts_of(dy, uneven()))
            for one, other in zip((found, *back), (y, *gradients), strict=True):
                assert one.dtype == dtype
                torch.testing.assert_close(one.double(), parts_of(other, uneven()), rtol=tolerance, atol=tolerance)


@CASES.case
def only_what_is_due_is_communicated() -> None:
    x, weight = parts_of(torch.randn(M, N), uneven()), parts_of(torch.randn(N), uneven()).requires_grad_()
    with communicates(allreduce=1):
        torch.autograd.grad(split_rms_norm(x, weight).sum(), weight)
    with communicates(allreduce=1), torch.no_grad():
        split_layer_norm(x)


@CASES.case
def rows_far_from_zero_keep_their_accuracy() -> None:
    """No worse than a kernel's of whole rows, of means that the ranks' parts have in common and that they have not."""
    world = dist.get_world_size()
    even = [N // world] * world
    for mean, noise, step in ((1e4, 1.0, 0.0), (1e4, 1e-2, 0.0), (-3e5, 0.5, 0.0), (1e4, 1e-2, 1.0), (0.0, 1e-3, 0.0)):
        x = torch.full((M, N), mean) + noise * torch.randn(M, N)
        x += step * torch.arange(world).repeat_interleave(N // world)
        exact = whole(True, x, None, None, 0.0)
        theirs = (normforge.layernorm2d_fwd(x, eps=0.0).y.double() - exact).abs().max()
        found = split_layer_norm(parts_of(x, even), eps=0.0)
        error = (found.double() - parts_of(exact, even)).abs().max()
        assert error <= 1.5 * theirs + 1e-6, (mean, noise, step, error, theirs)


@CASES.case
def rows_without_variance_and_with_infinities() -> None:
    x = torch.full((3, N), 123.456)
    x[1, 0] = float("nan")
    x[2] = 0.0
    found = split_layer_norm(parts_of(x, uneven()))
    assert torch.allclose(found[0], torch.zeros(()), atol=1e-2)
    assert found[1].isnan().all()
    assert torch.equal(found[2], torch.zeros_like(found[2]))
    assert split_rms_norm(parts_of(x, uneven()))[1].isnan().all()
    none = split_layer_norm(parts_of(x[:0], uneven()))
    assert none.shape == (0, uneven()[dist.get_rank()])


@CASES.case
def dtensors_lie_as_they_did() -> None:
    """A sharded weight has a sharded gradient, with nothing sent for it; a weight that every rank has is cut."""
    given = {name: torch.randn(shape) for name, shape in {"x": (2, M, N), "weight": (N,), "bias": (N,)}.items()}
    whole = {norm: partial(getattr(normforge, f"{norm}_norm"), normalized_shape=(N,)) for norm in ("layer", "rms")}
    pair = {"x": given["x"], "weight": given["weight"]}
    replicated = {"x": Shard(2), "weight": Replicate()}
    alike(split_rms_norm, pair, replicated, Shard(2), whole["rms"], allreduce=1)
    for each in given.values():
        each.requires_grad_()
    lies = {"x": Shard(2), "weight": Shard(0), "bias": Shard(0)}
    alike(split_layer_norm, given, lies, Shard(2), whole["layer"], allreduce=2)


@CASES.case
def compiled_norms_of_rows_that_are_split() -> None:
    for norm in (split_layer_norm, split_rms_norm):
        torch._dynamo.reset()
        x, weight = torch.randn(3, N, requires_grad=True), torch.randn(N, requires_grad=True)
        compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
        for given in ((x, weight), (placed(x, Shard(1)), placed(weight, Shard(0)))):
            found, expected = compiled(*given), norm(*given)
            torch.testing.assert_close(found, expected)
            one = torch.autograd.grad(found.sum(), given)
            other = torch.autograd.grad(expected.sum(), given)
            torch.testing.assert_close(one, other)


@CASES.case
def rows_that_are_sharded_and_split() -> None:
    """On two dimensions of a mesh: weights have partial gradients of each rank's rows."""
    world = dist.get_world_size()
    both = init_device_mesh(DEVICE, (world // 2, 2), mesh_dim_names=("rows", "columns"))
    x, weight = torch.randn(4, M, N, requires_grad=True), torch.randn(N, requires_grad=True)
    y = whole(False, x, weight, None, 1e-6)
    gradients = torch.autograd.grad(y.sum(), (x, weight))
    a = distribute_tensor(x.detach(), both, [Shard(0), Shard(2)]).requires_grad_()
    b = distribute_tensor(weight.detach(), both, [Replicate(), Shard(0)]).requires_grad_()
    found = split_rms_norm(a, b, 1e-6)
    dx, dweight = torch.autograd.grad(found, (a, b), distribute_tensor(torch.ones_like(x), both, [Shard(0), Shard(2)]))
    same(found, y.float(), Shard(0), Shard(2))
    same(dx, gradients[0].float(), Shard(0), Shard(2))
    same(dweight, gradients[1].float(), Partial(), Shard(0))


@CASES.case
def what_cannot_be_split_is_refused() -> None:
    x, weight = torch.randn(M, N), torch.randn(N)
    refused("Shard(1)", lambda: split_rms_norm(placed(x, Shard(0))), errors.LayoutError)
    part = DTensor.from_local(x, mesh(), [Partial()])
    refused("placements", lambda: split_rms_norm(part), errors.LayoutError)
    refused("plain tensor", lambda: split_rms_norm(placed(x, Shard(1)), weight), errors.DeviceError)
    refused("weight has shape", lambda: split_rms_norm(x, weight[1:]), errors.ShapeError)
    first = dist.new_group([0])
    if dist.get_rank():
        refused("not in the group", lambda: split_rms_norm(x, group=first), errors.DeviceError)
    refused("eps=-1", lambda: split_layer_norm(x, eps=-1), errors.ConflictError)
    refused("x has dtype", lambda: split_layer_norm(x.int()), errors.DTypeError)
    x.requires_grad_()
    gradient = torch.autograd.grad(split_rms_norm(x).square().sum(), x, create_graph=True)[0]
    with pytest.raises(errors.GradientError, match="double backward"):
        torch.autograd.grad(gradient.sum(), x)
