"""Under batch invariance what is compiled stays invariant, whoever runs it, and nothing is left to Inductor."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

import normforge
from normforge.calls.traced import INVARIANT
from normforge.compiled import rules
from normforge.errors import InvarianceError

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
        loss = (y * x.flip(-1)).sum() + total.sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert leaf.grad is not None
        return leaf.grad

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
            thread = threading.Thread(target=program, args=(x,))
            thread.start()
            thread.join()
        program(x)
    inside, outside = map(operators, made.graphs)
    assert inside == [f"normforge.rmsnorm2d_fwd{INVARIANT}.default"]
    assert [name for name in outside if "normforge" in name] == left


def test_an_exported_program_stays_invariant() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return normforge.rms_norm(x, (N,))

    x = rows(257)
    with normforge.batch_invariant():
        batch = normforge.rms_norm(x, (N,))
        rows_of_any_number = {"x": {0: torch.export.Dim("m", min=2, max=1000)}}
        program = torch.export.export(Module(), (x,), dynamic_shapes=rows_of_any_number)
    assert torch.equal(program.module()(x[3:12]), batch[3:12])


def test_what_torch_would_compute_is_refused_in_a_trace_too() -> None:
    @torch.compile(backend="aot_eager")
    def program(x: torch.Tensor) -> torch.Tensor:
        return normforge.layer_norm(x, (N,))

    with normforge.batch_invariant(), pytest.raises(InvarianceError, match="float64"):
        program(rows(3).double())
