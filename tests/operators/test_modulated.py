"""What torch.compile makes of modulated norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from .neighbours import FUNCTIONS, N, compiles


def block(
    norm: Callable[..., Any], x: torch.Tensor, six: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """A part of DiT's block."""
    shift, scale, gate = six.chunk(6, -1)[:3]
    y, total = norm(x, scale, shift, gate=gate, residual=residual, weight=weight)
    again: torch.Tensor = norm(total, scale, shift)
    summed: torch.Tensor = torch.nn.functional.silu(y) + total + again
    return summed


def leaves(samples: int, rows: int) -> list[torch.Tensor]:
    shapes = ((samples, rows, N), (samples, 6 * N), (samples, rows, N), (N,))
    return [torch.randn(shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_a_compiled_block_is_the_eager_one(norm: str, backend: str, fresh_dynamo: None) -> None:
    # Another number of samples, and then of rows, is traced anew as a symbol.
    calls = [leaves(samples, rows) for samples, rows in ((2, 3), (3, 3), (3, 5))]
    compiles(partial(block, FUNCTIONS[f"modulated_{norm}"]), backend, calls)
