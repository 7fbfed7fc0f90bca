"""What torch.compile makes of gated norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from .neighbours import FUNCTIONS, N, compiles


def block(norm: Callable[..., torch.Tensor], projected: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A part of Mamba2's block, and of Gated DeltaNet's."""
    gate, x = projected.chunk(2, -1)
    y = norm(x, gate, weight, norm_before_gate=False, group_size=N // 2)
    x, gate = (part.view(*part.shape[:-1], 4, N // 4) for part in (x, gate))
    heads = norm(x, gate, activation="sigmoid")
    found: torch.Tensor = y + heads.flatten(-2)
    return found


def leaves(rows: int = 3) -> list[torch.Tensor]:
    return [torch.randn(2, rows, 2 * N).requires_grad_(), torch.randn(N).requires_grad_()]


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_a_compiled_block_is_the_eager_one(norm: str, backend: str, fresh_dynamo: None) -> None:
    # Another number of rows is traced anew as a symbol.
    compiles(partial(block, FUNCTIONS[f"gated_{norm}"]), backend, [leaves(rows) for rows in (3, 5, 6)])
