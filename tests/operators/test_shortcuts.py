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
from torch.utils._python_dispatch import TorchDispatchMode

import normforge

from ..calling import FORWARD, each_norm, same_bits
from ..thorough import THOROUGH
from . import registered
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


@each_norm
def test_every_way_returns_the_same_bits(norm: str) -> None:
    values = given(norm, residual=torch.randn(M, N), fadd="pre_add_store", save_mv=True)
    with torch.no_grad():
        expected = function(norm, *values)
        for way in (registered.FORWARD[norm], at_once(norm)):
            assert all(map(same_bits, way(*values), expected))
    with torch.inference_mode():
        inside = tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in values)
        assert all(map(same_bits, registered.FORWARD[norm](*inside), expected))


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch declares none
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_at_once", [False, True])
@each_norm
def test_who_sees_operators_sees_them(norm: str, is_at_once: bool) -> None:
    run, values = at_once(norm) if is_at_once else registered.FORWARD[norm], given(norm)
    with torch.no_grad():
        run(*values)
        for seen in (run, partial(function, norm)):
            with _Seen() as mode:
                seen(*values)
            assert str(registered.FORWARD[norm]) in mode.names
        with FakeTensorMode() as fake:
            twins = [fake.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in values]
            (y,) = run(*twins)
        assert type(y) is type(twins[0])
        # Outside its mode too, a fake tensor is one.
        (y,) = run(*twins)
        assert type(y) is type(twins[0])
        functionalised: Any = torch.func.functionalize(run)
        assert all(map(same_bits, functionalised(*values), run(*values)))


@each_norm
def test_the_negative_of_a_tensors_memory_is_normalised_as_what_it_stands_for(norm: str) -> None:
    negated = torch._neg_view(torch.randn(M, N))
    values = given(norm, x=negated)
    with torch.no_grad():
        plain = (negated.clone().resolve_neg(), *values[1:])
        expected = registered.FORWARD[norm](*plain)
        for way in (registered.FORWARD[norm], at_once(norm)):
            assert all(map(same_bits, way(*values), expected))


@pytest.fixture
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return normforge.rms_norm(normforge.layer_norm(x, (N,), weight), (N,), weight)


def at_once_alone(code: str) -> bool:
    """Whether Inductor's code calls what stands for operators, and no operators."""
    called = [line for line in code.splitlines() if "= torch.ops.normforge." in line]
    return bool(called) and all(".default.at_once(" in line for line in called)


@pytest.mark.usefixtures("_nothing_compiled")
def test_inductors_code_calls_no_operator() -> None:
    x, weight = torch.randn(M, N), torch.randn(N)
    with torch.no_grad():
        y, (code,) = run_and_get_code(torch.compile(block, dynamic=True, fullgraph=True), x, weight)
        assert same_bits(y, block(x, weight))
    assert at_once_alone(code)


@THOROUGH
@pytest.mark.usefixtures("_nothing_compiled")
def test_inductors_code_of_a_backward_pass_calls_no_operator() -> None:
    x, weight = torch.randn(M, N, requires_grad=True), torch.randn(N, requires_grad=True)
    compiled = torch.compile(block, dynamic=True, fullgraph=True)
    gradients, codes = run_and_get_code(lambda: torch.autograd.grad(compiled(x, weight).sum(), (x, weight)))
    assert all(map(same_bits, gradients, torch.autograd.grad(block(x, weight).sum(), (x, weight))))
    assert [at_once_alone(code) for code in codes] == [True, True]


@THOROUGH
@pytest.mark.usefixtures("_nothing_compiled")
def test_inductors_code_that_says_where_to_write_calls_no_operator() -> None:
    def written(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        normforge.rmsnorm2d_fwd(x, weight, out=out)
        return out

    x, weight, out = torch.randn(M, N), torch.randn(N), torch.empty(M, N)
    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(written, fullgraph=True), x, weight, out)
        assert same_bits(out, normforge.rmsnorm2d_fwd(x, weight).y)
    assert at_once_alone(code)
