"""torch.ops.normforge.gated_layer_norm and gated_rms_norm, and what torch.compile makes of gated norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from normforge.errors import GradientError

N = 32

FUNCTIONS: dict[str, Any] = {"layer": normforge.gated_layer_norm, "rms": normforge.gated_rms_norm}
OPERATORS: dict[str, Any] = {norm: getattr(torch.ops.normforge, f"gated_{norm}_norm").default for norm in FUNCTIONS}

each_norm = pytest.mark.parametrize("norm", FUNCTIONS)


def block(norm: str, projected: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A part of Mamba2's block, and of Gated DeltaNet's."""
    gate, x = projected.chunk(2, -1)
    y = FUNCTIONS[norm](x, gate, weight, norm_before_gate=False, group_size=N // 2)
    x, gate = (part.view(*part.shape[:-1], 4, N // 4) for part in (x, gate))
    heads = FUNCTIONS[norm](x, gate, activation="sigmoid")
    found: torch.Tensor = y + heads.flatten(-2)
    return found


def leaves(rows: int = 3) -> list[torch.Tensor]:
    return [torch.randn(2, rows, 2 * N).requires_grad_(), torch.randn(N).requires_grad_()]


@each_norm
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_a_compiled_block_is_the_eager_one(norm: str, backend: str) -> None:
    compiled = torch.compile(lambda *tensors: block(norm, *tensors), fullgraph=True, backend=backend)
    # Another number of rows is traced anew as a symbol.
    for rows in (3, 5, 6):
        given = leaves(rows)
        y, its = compiled(*given), block(norm, *given)
        torch.testing.assert_close(y, its, rtol=1e-5, atol=1e-5)
        dy = torch.randn_like(y)
        gradients = torch.autograd.grad(y, given, dy)
        torch.testing.assert_close(gradients, torch.autograd.grad(its, given, dy), rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


def arguments(norm: str, *, groups: bool, grad: bool, save_mv: bool = True, **others: Any) -> tuple[Any, ...]:
    """A call of an operator, in the order of its schema."""
    gate, x = torch.randn(3, 2, 2 * N).chunk(2, -1)
    weight = torch.randn(2, N) if groups else torch.randn(N)
    vectors = (weight, weight.clone()) if norm == "layer" else (weight,)
    tensors = [tensor.detach().requires_grad_(grad) for tensor in (x, gate, *vectors)]
    offset = () if norm == "layer" else (0.5,)
    words = (others.get("gating", "after_norm"), others.get("activation", "silu"), 1e-5, *offset)
    return (*tensors, *words, others.get("fquant", "none"), others.get("out_dtype"), save_mv)


@each_norm
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_operators_are_what_torch_wants(norm: str, groups: bool, grad: bool) -> None:
    torch.library.opcheck(OPERATORS[norm], arguments(norm, groups=groups, grad=grad))


@each_norm
def test_a_quantising_operator_is_what_torch_wants(norm: str) -> None:
    given = arguments(norm, groups=True, grad=False, save_mv=False, fquant="dynamic", out_dtype=torch.int8)
    torch.library.opcheck(OPERATORS[norm], given)
    y, y_scale = OPERATORS[norm](*given)
    assert (y.dtype, y_scale.dtype, y_scale.shape) == (torch.int8, torch.float32, y.shape[:-1])


@each_norm
def test_an_operator_returns_what_is_asked_for(norm: str) -> None:
    assert len(OPERATORS[norm](*arguments(norm, groups=True, grad=False))) == (3 if norm == "layer" else 2)
    assert len(OPERATORS[norm](*arguments(norm, groups=False, grad=False, save_mv=False))) == 1


@each_norm
def test_a_gradient_needs_statistics(norm: str) -> None:
    y = OPERATORS[norm](*arguments(norm, groups=False, grad=True, save_mv=False))[0]
    with pytest.raises(GradientError, match="mean and rstd were not saved; pass save_mv=True"):
        y.sum().backward()


@each_norm
def test_an_exported_program_holds_the_operator(norm: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = FUNCTIONS[norm](x, gate, group_size=16)
            return found

    given = torch.randn(2, 3, N), torch.randn(2, 3, N)
    program = torch.export.export(Model(), given)
    assert OPERATORS[norm] in [node.target for node in program.graph.nodes]
    assert torch.equal(program.module()(*given), Model()(*given))


@each_norm
def test_symbolic_tracing_records_the_public_function(norm: str) -> None:
    graph = torch.fx.symbolic_trace(
        lambda x, gate: FUNCTIONS[norm](x, gate, group_size=8, eps=1e-3, norm_before_gate=False)
    )
    assert FUNCTIONS[norm] in [node.target for node in graph.graph.nodes]
    x, gate = torch.randn(2, 3, N), torch.randn(2, 3, N)
    wanted = FUNCTIONS[norm](x, gate, group_size=8, eps=1e-3, norm_before_gate=False)
    assert torch.equal(graph(x, gate), wanted)
