"""What an operator's call goes through on the host, in eager code and in Inductor's, and who sees it still."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

import normforge

from ..calling import FORWARD, each_norm, same_bits
from ..thorough import THOROUGH
from . import registered
from .registered import seen
from .test_operators import arguments

M, N = 3, 64


def given(norm: str, **others: Any) -> tuple[Any, ...]:
    vectors = {"weight": torch.randn(N), "bias": torch.randn(N) if norm == "layer" else None}
    return arguments(norm, {"x": torch.randn(M, N), **vectors, "residual": None, "x_bias": None, **others})


def at_once(norm: str) -> Callable[..., Any]:
    operator: Any = registered.FORWARD[norm]
    function: Callable[..., Any] = operator.at_once
    return function


def function(norm: str, *values: Any) -> list[torch.Tensor]:
    return [each for each in FORWARD[norm](**registered.by_name(registered.FORWARD[norm], values)) if each is not None]


@pytest.mark.parametrize("negated", [False, True])
@each_norm
def test_every_way_returns_the_same_bits(norm: str, negated: bool) -> None:
    """Of the negative of a tensor's memory too, which is normalised as what it stands for."""
    x, *others = given(norm, residual=torch.randn(M, N), fadd="pre_add_store", save_mv=True)
    with torch.no_grad():
        expected = function(norm, x, *others)
        x = torch._neg_view(-x) if negated else x
        for way in (registered.FORWARD[norm], at_once(norm)):
            assert all(map(same_bits, way(x, *others), expected))
    with torch.inference_mode():
        inside = [each.clone() if isinstance(each, torch.Tensor) else each for each in others]
        assert all(map(same_bits, registered.FORWARD[norm](x.clone(), *inside), expected))


@pytest.mark.parametrize("is_at_once", [False, True])
@each_norm
def test_who_sees_operators_sees_them(norm: str, is_at_once: bool) -> None:
    run, values = at_once(norm) if is_at_once else registered.FORWARD[norm], given(norm)
    with torch.no_grad():
        run(*values)
        for way in (run, partial(function, norm)):
            assert [operator for operator, _ in seen(way, *values)] == [registered.FORWARD[norm]]
        with FakeTensorMode() as fake:
            twins = [fake.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in values]
            (y,) = run(*twins)
        assert type(y) is type(twins[0])
        # Outside its mode too, a fake tensor is one.
        (y,) = run(*twins)
        assert type(y) is type(twins[0])
        functionalised: Any = torch.func.functionalize(run)
        assert all(map(same_bits, functionalised(*values), run(*values)))


@pytest.fixture
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def block(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return normforge.rms_norm(normforge.layer_norm(x, (N,), weight), (N,), weight)


def written(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    normforge.rmsnorm2d_fwd(x, weight, out=out)
    return out


@pytest.mark.usefixtures("_nothing_compiled")
@pytest.mark.parametrize(
    ("call", "trains"),
    [(block, False), pytest.param(block, True, marks=THOROUGH), pytest.param(written, False, marks=THOROUGH)],
)
def test_inductors_code_calls_no_operator(call: Callable[..., torch.Tensor], trains: bool) -> None:
    """Neither of a forward pass nor of a backward one, nor where the caller says where to write."""
    leaves = torch.randn(M, N, requires_grad=trains), torch.randn(N, requires_grad=trains)

    def run(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        y = function(*leaves, torch.empty(M, N))
        return (y, *torch.autograd.grad(y.sum(), leaves)) if trains else (y,)

    found, codes = run_and_get_code(run, torch.compile(call, dynamic=True, fullgraph=True))
    assert all(map(same_bits, found, run(call)))
    assert len(codes) == 1 + trains
    for code in codes:
        called = [line for line in code.splitlines() if "= torch.ops.normforge." in line]
        assert called
        assert all(".default.at_once(" in line for line in called)
