"""What operators of modulated and of gated norms have in common, and what torch makes of their functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normforge.errors import GradientError

from .neighbours import FUNCTIONS, OPERATORS, N, arguments, each_norm

# A call's tensors behind x, and what else it is told, by family.
_BEHIND: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "gated": (((2, 3, N),), {"group_size": 8, "norm_before_gate": False}),
    "modulated": (((2, N), (2, N)), {}),
}


def call(name: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    shapes, told = _BEHIND[name.partition("_")[0]]
    return [torch.randn(shape) for shape in ((2, 3, N), *shapes)], {**told, "eps": 1e-3}


@each_norm
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_operators_are_what_torch_wants(name: str, full: bool, grad: bool) -> None:
    torch.library.opcheck(OPERATORS[name], arguments(name, full=full, grad=grad))


@each_norm
def test_an_operator_returns_what_is_asked_for(name: str) -> None:
    """Y and the statistics, and of a residual that is added the sum."""
    found = OPERATORS[name](*arguments(name, full=True))
    assert len(found) == 2 + name.endswith("layer") + name.startswith("modulated")
    assert len(OPERATORS[name](*arguments(name, full=False, save_mv=False))) == 1


@each_norm
def test_a_gradient_needs_statistics(name: str) -> None:
    y = OPERATORS[name](*arguments(name, full=False, grad=True, save_mv=False))[0]
    with pytest.raises(GradientError, match="mean and rstd were not saved; pass save_mv=True"):
        y.sum().backward()


@each_norm
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_what_is_quantised_has_no_gradient(name: str, dtype: torch.dtype) -> None:
    found = OPERATORS[name](*arguments(name, full=True, grad=True, fquant="dynamic", out_dtype=dtype))
    assert not [each for each in found if each.requires_grad]


@each_norm
def test_an_exported_program_holds_the_operator(name: str) -> None:
    tensors, told = call(name)

    class Model(torch.nn.Module):
        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = FUNCTIONS[name](*given, **told)
            return found

    program = torch.export.export(Model(), tuple(tensors))
    assert OPERATORS[name] in [node.target for node in program.graph.nodes]
    assert torch.equal(program.module()(*tensors), Model()(*tensors))


@each_norm
def test_symbolic_tracing_records_the_public_function(name: str) -> None:
    tensors, told = call(name)
    behind = tensors[2:]
    graph = torch.fx.symbolic_trace(lambda x, beside: FUNCTIONS[name](x, beside, *behind, **told))
    assert FUNCTIONS[name] in [node.target for node in graph.graph.nodes]
    assert torch.equal(graph(*tensors[:2]), FUNCTIONS[name](*tensors, **told))
