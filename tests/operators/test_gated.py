"""What torch.compile makes of gated norms, and their operators that quantise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge

from .neighbours import OPERATORS, arguments

N = 32

FUNCTIONS: dict[str, Any] = {"layer": normforge.gated_layer_norm, "rms": normforge.gated_rms_norm}

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


@each_norm
def test_a_quantising_operator_is_what_torch_wants(norm: str) -> None:
    operator = OPERATORS[f"gated_{norm}"]
    given = arguments(f"gated_{norm}", full=True, save_mv=False, fquant="dynamic", out_dtype=torch.int8)
    torch.library.opcheck(operator, given)
    y, y_scale = operator(*given)
    assert (y.dtype, y_scale.dtype, y_scale.shape) == (torch.int8, torch.float32, y.shape[:-1])
