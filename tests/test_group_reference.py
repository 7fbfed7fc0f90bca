"""The oracle of GroupNorm agrees with torch's operators and autograd in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from normforge.reference.grouped import group_norm, group_norm_bwd


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("affine", [False, True])
def test_it_is_torchs(activation: str | None, affine: bool) -> None:
    x, dy = torch.randn(2, 3, 6, 5, 4, dtype=torch.float64)
    weight, bias = torch.randn(2, 6, dtype=torch.float64) if affine else (None, None)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    y = functional.group_norm(x, 2, weight, bias, 1e-3)
    y = functional.silu(y) if activation == "silu" else y
    gradients = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        found = group_norm(x, 2, weight, bias, 1e-3, activation=activation)
        made = group_norm_bwd(dy, x, 2, weight, bias, 1e-3, activation=activation)
    torch.testing.assert_close(found.y, y.detach())
    torch.testing.assert_close(found.mean, x.detach().reshape(3, 2, -1).mean(-1))
    torch.testing.assert_close(found.rstd, (x.detach().reshape(3, 2, -1).var(-1, correction=0) + 1e-3).rsqrt())
    torch.testing.assert_close(list(made[: len(gradients)]), list(gradients))
    for name, gradient in zip(("dx", "dweight", "dbias"), gradients, strict=False):
        assert bool((gradient.abs() <= made.magnitudes[name] * (1 + 1e-12)).all())
