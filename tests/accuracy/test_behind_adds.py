"""Gradients behind a fused add, on rows whose mean is far from their spread: the accuracy rule, call to gradient."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import normforge
from normforge.codegen.values import Norm
from normforge.reference import BACKWARD
from proving.accuracy import peer
from proving.accuracy.peer import EPS
from proving.accuracy.units import MOST, Exact, ratio, statistics

from ..thorough import THOROUGH

M = 6
# Rows that lie together, one in chunks, and one that is read again.
LENGTHS = (100, 1000, pytest.param(20000, marks=THOROUGH))
# Up to a mean ten thousand times the spread: 16 bits then hold one value or two.
ROWS = ((0.0, 1.0), (100.0, 0.3), (100.0, 0.05), (1000.0, 1.0), (1000.0, 0.1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_no_error_is_over_four_times_torchs(norm: str, n: int, dtype: torch.dtype, device: str) -> None:
    """Torch adds, and normalises the sum; it is given that sum."""
    generator = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    centres, failing = norm == "layer", []
    weight, bias = ((1 + 0.1 * normal(n)).to(device, dtype) for _ in range(2))
    for (mean, spread), dropout in product(ROWS, (False, True)):
        x = (spread * normal(M, n) + mean / 2).to(device, dtype).requires_grad_()
        residual = (normal(M, n) * spread + mean / 2).to(device, dtype).requires_grad_()
        dy = normal(M, n).to(device, dtype)
        scale, shift = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        # Half of x, so that what is left is doubled, which is exact.
        p, rng = (0.5, torch.tensor([1, 2], device=device)) if dropout else (0.0, None)
        if centres:
            y, total = normforge.add_layer_norm(x, residual, scale, shift, EPS, dropout_p=p, dropout_rng=rng)
        else:
            y, total = normforge.add_rms_norm(x, residual, scale, EPS, dropout_p=p, dropout_rng=rng)
        leaves = (x, residual, scale, shift) if centres else (x, residual, scale)
        _, *found = torch.autograd.grad(y, leaves, dy)
        names = ("dx", "dweight", "dbias") if centres else ("dx", "dweight")
        exact = _exact(centres, total.detach(), weight, dy)
        saved = {name: each for name, each in peer.norm(centres, total.detach(), weight, bias).items() if name != "y"}
        theirs = peer.gradients(centres, dy, total.detach(), weight, saved)
        for name, ours in zip(names, found, strict=True):
            times = ratio(exact[name].error_of(ours), exact[name].error_of(theirs[name]), dtype)
            if times > MOST:
                failing.append((mean, spread, dropout, name, times))
    assert not failing


def _exact(centres: bool, total: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> dict[str, Exact]:
    mean, rstd = statistics(total, EPS, centres=centres)
    saved = {"mean": mean[:, 0], "rstd": rstd[:, 0]} if centres else {"rstd": rstd[:, 0]}
    made = BACKWARD[Norm.LAYER if centres else Norm.RMS](dy, total, weight, **saved)
    names = ("dx", "dweight", "dbias") if centres else ("dx", "dweight")
    return {name: Exact(getattr(made, name), made.magnitudes[name]) for name in names}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_y_is_torchs_norm_of_torchs_sum_to_rounding(dtype: torch.dtype) -> None:
    """A fused block computes what the block computed before: the same sum to the bit, and y within one step."""
    torch.manual_seed(0)
    x, residual = (50 + 0.3 * torch.randn(M, 100) for _ in range(2))
    x, residual = x.to(dtype), residual.to(dtype)
    y, total = normforge.add_layer_norm(x, residual, torch.ones(100, dtype=dtype), torch.zeros(100, dtype=dtype))
    assert torch.equal(total, x + residual)
    expected = torch.nn.functional.layer_norm((x + residual).double(), (100,))
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
