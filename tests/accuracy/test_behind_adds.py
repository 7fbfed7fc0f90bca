"""Gradients behind a fused add, on rows whose mean is far from their spread: the accuracy rule, call to gradient."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from normforge.codegen.families import Kind
from normforge.codegen.values import Norm
from normforge.reference import BACKWARD
from proving.accuracy import peer
from proving.accuracy.units import MOST, Exact, ratio, statistics
from proving.cases import cases, gradients

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
    # Half of x, so that what is left is doubled, which is exact.
    calls = [cases("plain", vary=(), norm=norm, shape=(M, n), without=("x_bias",), dropout_p=p)[0] for p in (0.0, 0.5)]
    for (mean, spread), call in product(ROWS, calls):
        given = {}
        for row in call.rows:
            drawn = spread * normal(M, n) + mean / 2 if row.kind is Kind.ROWS else 1 + 0.1 * normal(n)
            given[row.name] = drawn.to(device, dtype).requires_grad_()
        dy, weight = normal(M, n).to(device, dtype), given["weight"].detach()
        y, total = call.run(given)
        found, rows = gradients([y], given, [dy]), total.detach()
        # The gradient of the sum, which is what is normalised.
        found["x"] = found["residual"]
        fp64 = zip(("mean", "rstd"), statistics(rows, peer.EPS, centres=centres), strict=True)
        saved = {name: each.squeeze(-1) for name, each in fp64 if centres or name == "rstd"}
        exact = BACKWARD[Norm(norm)](dy, rows, weight, **saved)
        saved = {name: each for name, each in peer.norm(centres, rows, weight, None).items() if name != "y"}
        for name, theirs in peer.gradients(centres, dy, rows, weight, saved).items():
            want = Exact(getattr(exact, name), exact.magnitudes[name])
            times = ratio(want.error_of(found[name.removeprefix("d")]), want.error_of(theirs), dtype)
            if times > MOST:
                failing.append((mean, spread, call["dropout_p"], name, times))
    assert not failing
