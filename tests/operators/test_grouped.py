"""torch.ops.normforge.group_norm, and what torch.compile, torch.export and transforms make of GroupNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import normforge
from normforge.errors import DTypeError, GradientError, LayoutError

from ..thorough import THOROUGH

OPERATOR: Any = torch.ops.normforge.group_norm.default
BACKWARD: Any = torch.ops.normforge.group_norm_backward.default

each_layout = pytest.mark.parametrize("channels_last", [False, True])


def leaves(channels_last: bool, samples: int = 2, grad: bool = True) -> list[torch.Tensor]:
    x = torch.randn(samples, 8, 3, 5)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    return [tensor.requires_grad_(grad) for tensor in (x, torch.randn(8), torch.randn(8))]


def block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A part of a UNet's block."""
    y = normforge.group_norm(x, 4, weight, bias, activation="silu")
    again: torch.Tensor = x + normforge.group_norm(y * 2, 2, weight, None, 1e-3)
    return again


@each_layout
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=THOROUGH)])
def test_a_compiled_block_is_the_eager_one(channels_last: bool, backend: str) -> None:
    given = leaves(channels_last)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for samples in (2, 3):
        y, its = compiled(*given), block(*given)
        torch.testing.assert_close(y, its, rtol=1e-5, atol=1e-5)
        assert y.stride() == its.stride()
        dy = torch.randn_like(y)
        gradients = torch.autograd.grad(y, given, dy)
        torch.testing.assert_close(gradients, torch.autograd.grad(its, given, dy), rtol=1e-4, atol=1e-4)
        # Another number of samples, which is traced anew as a symbol.
        given = leaves(channels_last, samples + 1)
    torch._dynamo.reset()


def arguments(channels_last: bool, *, save_mv: bool, grad: bool) -> tuple[Any, ...]:
    return (*leaves(channels_last, grad=grad), 4, 1e-5, "silu", None, save_mv)


@each_layout
@pytest.mark.parametrize("grad", [False, True])
def test_operators_are_what_torch_wants(channels_last: bool, grad: bool) -> None:
    torch.library.opcheck(OPERATOR, arguments(channels_last, save_mv=True, grad=grad))


@each_layout
def test_the_backward_operator_is_what_torch_wants(channels_last: bool) -> None:
    x, weight, bias = leaves(channels_last, grad=False)
    _, statistics = OPERATOR(*arguments(channels_last, save_mv=True, grad=False))
    dy = torch.randn_like(x)
    given = (dy, x, weight, bias, statistics, 4, 1e-5, "silu", ["dx", "dweight", "dbias"])
    torch.library.opcheck(BACKWARD, given)


def test_an_operator_returns_what_is_asked_for() -> None:
    y, statistics = OPERATOR(*arguments(True, save_mv=True, grad=False))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert statistics.shape == (2, 2, 4)
    assert len(OPERATOR(*arguments(True, save_mv=False, grad=False))) == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float4_e2m1fn_x2], ids=str)
def test_an_operator_quantises_nothing(dtype: torch.dtype) -> None:
    x = torch.randn(2, 8, 3)
    for device in ("cpu", "meta"):
        with pytest.raises(DTypeError, match=rf"out_dtype is {dtype}; it takes None, torch.float16"):
            OPERATOR(x.to(device), None, None, 4, 1e-5, "none", dtype, False)


def test_an_operator_copies_nothing() -> None:
    x = torch.randn(2, 8, 5, 3).transpose(2, 3)
    with pytest.raises(LayoutError, match=r"pass x\.contiguous\(\), or call normforge\.group_norm"):
        OPERATOR(x, None, None, 2, 1e-5, "none", None, False)


def test_a_gradient_needs_statistics() -> None:
    y = OPERATOR(*arguments(False, save_mv=False, grad=True))[0]
    with pytest.raises(GradientError, match="mean and rstd were not saved; pass save_mv=True"):
        y.sum().backward()


def test_an_exported_program_holds_the_operator() -> None:
    program = torch.export.export(normforge.GroupNorm(4, 8), (torch.randn(2, 8, 5),))
    assert OPERATOR in [node.target for node in program.graph.nodes]
    x = torch.randn(2, 8, 5)
    torch.testing.assert_close(program.module()(x), functional.group_norm(x, 4))


def test_symbolic_tracing_records_the_public_function() -> None:
    graph = torch.fx.symbolic_trace(lambda x: normforge.group_norm(x, 2, eps=1e-3, activation="silu"))
    assert normforge.group_norm in [node.target for node in graph.graph.nodes]
    x = torch.randn(2, 8, 5)
    torch.testing.assert_close(graph(x), functional.silu(functional.group_norm(x, 2, eps=1e-3)))


Call = Callable[[torch.Tensor], torch.Tensor]
TRANSFORMS: dict[str, Callable[[Call, torch.Tensor], Any]] = {
    "grad": lambda call, x: func.grad(lambda x: call(x).square().sum())(x),
    "vmap": lambda call, x: func.vmap(call)(torch.stack((x, 2 * x + 1))),
    "jvp": lambda call, x: func.jvp(call, (x,), (x.cos(),)),
    "functionalize": lambda call, x: func.functionalize(call)(x),
    "checkpoint": lambda call, x: torch.autograd.grad(
        checkpoint(lambda x: call(x).square(), x.requires_grad_(), use_reentrant=False).sum(), x
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform(transform: str) -> None:
    weight, bias = torch.randn(2, 8)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return normforge.group_norm(x, 4, weight, bias, activation="silu")

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return functional.silu(functional.group_norm(x, 4, weight, bias))

    x = torch.randn(2, 8, 6)
    within = TRANSFORMS[transform]
    torch.testing.assert_close(within(ours, x.clone()), within(theirs, x.clone()), rtol=1e-4, atol=1e-4)
