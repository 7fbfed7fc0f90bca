"""Under batch invariance what is compiled stays invariant, whoever runs it, and nothing is left to Inductor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

import normforge
from normforge.calls.traced import INVARIANT
from normforge.compiled import rules
from normforge.errors import InvarianceError

from ..calling import FORWARD, each_norm, in_threads, same_bits, there
from ..thorough import THOROUGH
from . import registered
from .registered import seen
from .test_operators import arguments

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N = 131


def rows(m: int) -> torch.Tensor:
    return torch.randn(m, N, generator=torch.Generator().manual_seed(7)) + 100.0


def operators(graph: torch.fx.GraphModule) -> list[str]:
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name for name in names if "normforge" in name or "norm" in name]


def test_a_compiled_gradient_is_invariant_wherever_it_runs() -> None:
    """Autograd's threads know nothing of a `with`, and here it is over, too."""
    weight = torch.linspace(0.5, 2.0, N, requires_grad=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def program(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return normforge.add_rms_norm(x, residual, weight)

    def gradient(x: torch.Tensor, function: Callable[..., Any]) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        with normforge.batch_invariant():
            y, total = function(leaf, x.flip(-1))
        in_threads(torch.Tensor.backward, [(y * x.flip(-1)).sum() + total.sum()])
        return there(leaf.grad)

    x = rows(257)
    batch = gradient(x, program)
    assert torch.equal(gradient(x[3:12], program), batch[3:12])
    assert torch.equal(gradient(x, lambda x, residual: normforge.add_rms_norm(x, residual, weight)), batch)


@pytest.mark.parametrize(("least", "left"), [(0, ["normforge.rmsnorm2d_fwd.default"]), (1 << 22, [])])
def test_a_graph_holds_twins_and_another_thread_runs_them(
    least: int, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was traced is invariant for good: a CUDA graph of it may be captured by anybody.

    Nor is a norm of few elements left to Inductor then, whose norms are of blocks that follow from M.
    """
    monkeypatch.setattr(rules, "LEAST_ELEMENTS", least)
    made = EagerAndRecordGraphs()

    @torch.compile(backend=made, fullgraph=True)
    def program(x: torch.Tensor) -> torch.Tensor:
        return normforge.rms_norm(x, (N,))

    x = rows(3)
    with normforge.compile_passes():
        with normforge.batch_invariant():
            program(x)
            in_threads(program, [x])
        program(x)
    inside, outside = map(operators, made.graphs)
    assert inside == [f"normforge.rmsnorm2d_fwd{INVARIANT}.default"]
    assert [name for name in outside if "normforge" in name] == left


def test_what_torch_would_compute_is_refused_in_a_trace_too() -> None:
    @torch.compile(backend="aot_eager")
    def program(x: torch.Tensor) -> torch.Tensor:
        return normforge.layer_norm(x, (N,))

    with normforge.batch_invariant(), pytest.raises(InvarianceError, match="float64"):
        program(rows(3).double())


M, COLUMNS = 3, 64


def given(norm: str, **others: Any) -> tuple[Any, ...]:
    vectors = {"weight": torch.randn(COLUMNS), "bias": torch.randn(COLUMNS) if norm == "layer" else None}
    return arguments(norm, {"x": torch.randn(M, COLUMNS), **vectors, "residual": None, "x_bias": None, **others})


def at_once(norm: str) -> Any:
    operator: Any = registered.FORWARD[norm]
    return operator.at_once


def function(norm: str, *values: Any) -> list[torch.Tensor]:
    return [each for each in FORWARD[norm](**registered.by_name(registered.FORWARD[norm], values)) if each is not None]


@pytest.mark.parametrize("negated", [False, True])
@each_norm
def test_every_way_returns_the_same_bits(norm: str, negated: bool) -> None:
    """Of the negative of a tensor's memory too, which is normalised as what it stands for."""
    x, *others = given(norm, residual=torch.randn(M, COLUMNS), fadd="pre_add_store", save_mv=True)
    with torch.no_grad():
        expected = function(norm, x, *others)
        x = torch._neg_view(-x) if negated else x
        for way in (registered.FORWARD[norm], at_once(norm), torch.func.functionalize(at_once(norm))):
            assert all(map(same_bits, way(x, *others), expected))
    with torch.inference_mode():
        inside = [each.clone() if isinstance(each, torch.Tensor) else each for each in others]
        assert all(map(same_bits, registered.FORWARD[norm](x.clone(), *inside), expected))


@each_norm
def test_who_sees_operators_sees_them(norm: str) -> None:
    """Outside its mode too, a fake tensor is one."""
    values, fake = given(norm), FakeTensorMode()
    twins = [fake.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in values]
    for way in (registered.FORWARD[norm], at_once(norm), partial(function, norm)):
        with torch.no_grad():
            assert [operator for operator, _ in seen(way, *values)] == [registered.FORWARD[norm]]
            for mode in (fake, nullcontext()):
                with mode:
                    (y,) = way(*twins)
                assert type(y) is type(twins[0])


def block(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return normforge.rms_norm(normforge.layer_norm(x, (COLUMNS,), weight), (COLUMNS,), weight)


def written(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    normforge.rmsnorm2d_fwd(x, weight, out=out)
    return out


@pytest.mark.parametrize(
    ("call", "trains"),
    [(block, False), pytest.param(block, True, marks=THOROUGH), pytest.param(written, False, marks=THOROUGH)],
)
def test_inductors_code_calls_no_operator(call: Callable[..., torch.Tensor], trains: bool) -> None:
    """Neither of a forward pass nor of a backward one, nor where the caller says where to write."""
    leaves = torch.randn(M, COLUMNS, requires_grad=trains), torch.randn(COLUMNS, requires_grad=trains)

    def run(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        y = function(*leaves, torch.empty(M, COLUMNS))
        return (y, *torch.autograd.grad(y.sum(), leaves)) if trains else (y,)

    with torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False):
        found, codes = run_and_get_code(run, torch.compile(call, dynamic=True, fullgraph=True))
    assert all(map(same_bits, found, run(call)))
    assert len(codes) == 1 + trains
    for code in codes:
        called = [line for line in code.splitlines() if "= torch.ops.normforge." in line]
        assert called
        assert all(".default.at_once(" in line for line in called)
