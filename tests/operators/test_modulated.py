"""What torch.compile makes of modulated norms, and their operators that quantise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge

from .neighbours import OPERATORS, arguments

N = 32

FUNCTIONS: dict[str, Any] = {"layer": normforge.modulated_layer_norm, "rms": normforge.modulated_rms_norm}

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


@each_norm
@pytest.mark.parametrize("full", [False, True])
def test_a_quantising_operator_is_what_torch_wants(norm: str, full: bool) -> None:
    name = f"modulated_{norm}"
    given = arguments(name, full=full, save_mv=False, fquant="dynamic", out_dtype=torch.int8)
    torch.library.opcheck(OPERATORS[name], given)
    y, *total, y_scale = OPERATORS[name](*given)
    assert (y.dtype, y_scale.dtype, y_scale.shape) == (torch.int8, torch.float32, y.shape[:-1])
    assert [each.shape for each in total] == [y.shape] * full
