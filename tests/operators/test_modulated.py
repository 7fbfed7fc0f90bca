"""torch.ops.normforge.modulated_layer_norm and modulated_rms_norm, and what torch.compile makes of modulated norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from normforge.errors import GradientError

N = 32

FUNCTIONS: dict[str, Any] = {"layer": normforge.modulated_layer_norm, "rms": normforge.modulated_rms_norm}
OPERATORS: dict[str, Any] = {norm: getattr(torch.ops.normforge, f"modulated_{norm}_norm").default for norm in FUNCTIONS}

each_norm = pytest.mark.parametrize("norm", FUNCTIONS)


def block(norm: str, x: torch.Tensor, six: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A part of DiT's block."""
    shift, scale, gate = six.chunk(6, -1)[:3]
    y, total = FUNCTIONS[norm](x, scale, shift, gate=gate, residual=residual, weight=weight)
    again: torch.Tensor = FUNCTIONS[norm](total, scale, shift)
    summed: torch.Tensor = torch.nn.functional.silu(y) + total + again
    return summed


def leaves() -> list[torch.Tensor]:
    shapes = ((2, 3, N), (2, 6 * N), (2, 3, N), (N,))
    return [torch.randn(shape).requires_grad_() for shape in shapes]


@each_norm
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_a_compiled_block_is_the_eager_one(norm: str, backend: str) -> None:
    given = leaves()
    compiled = torch.compile(lambda *tensors: block(norm, *tensors), fullgraph=True, backend=backend)
    for _ in range(2):
        y, its = compiled(*given), block(norm, *given)
        torch.testing.assert_close(y, its, rtol=1e-5, atol=1e-5)
        dy = torch.randn_like(y)
        gradients = torch.autograd.grad(y, given, dy)
        torch.testing.assert_close(gradients, torch.autograd.grad(its, given, dy), rtol=1e-4, atol=1e-4)
        # Another number of samples, and then of rows, which is traced anew as a symbol.
        given = [torch.randn(3, *each.shape[1:]).requires_grad_() if each.dim() > 1 else each for each in given]
    torch._dynamo.reset()


def arguments(norm: str, *, gated: bool, save_mv: bool, grad: bool) -> tuple[Any, ...]:
    x, six, residual, weight = (each.requires_grad_(grad) for each in leaves())
    shift, scale, gate = six.chunk(6, -1)[:3]
    tensors = (x, scale, shift, gate, residual) if gated else (x, scale, shift, None, None)
    others = (None, 1e-5) if norm == "layer" else (1e-5, 0.5)
    return (*tensors, weight, *others, None, save_mv)


@each_norm
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_operators_are_what_torch_wants(norm: str, gated: bool, grad: bool) -> None:
    torch.library.opcheck(OPERATORS[norm], arguments(norm, gated=gated, save_mv=True, grad=grad))


@each_norm
def test_an_operator_returns_what_is_asked_for(norm: str) -> None:
    found = OPERATORS[norm](*arguments(norm, gated=True, save_mv=True, grad=False))
    assert len(found) == (4 if norm == "layer" else 3)
    assert len(OPERATORS[norm](*arguments(norm, gated=False, save_mv=False, grad=False))) == 1


@each_norm
def test_a_gradient_needs_statistics(norm: str) -> None:
    y = OPERATORS[norm](*arguments(norm, gated=False, save_mv=False, grad=True))[0]
    with pytest.raises(GradientError, match="mean and rstd were not saved; pass save_mv=True"):
        y.sum().backward()


@each_norm
def test_an_exported_program_holds_the_operator(norm: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = FUNCTIONS[norm](x, scale, scale)
            return found

    given = torch.randn(2, 3, N), torch.randn(2, N)
    program = torch.export.export(Model(), given)
    assert OPERATORS[norm] in [node.target for node in program.graph.nodes]
    assert torch.equal(program.module()(*given), Model()(*given))


@each_norm
def test_symbolic_tracing_records_the_public_function(norm: str) -> None:
    graph = torch.fx.symbolic_trace(lambda x, scale: FUNCTIONS[norm](x, scale, scale, eps=1e-3))
    assert FUNCTIONS[norm] in [node.target for node in graph.graph.nodes]
    given = torch.randn(2, 3, N), torch.randn(2, N)
    assert torch.equal(graph(*given), FUNCTIONS[norm](given[0], given[1], given[1], eps=1e-3))
