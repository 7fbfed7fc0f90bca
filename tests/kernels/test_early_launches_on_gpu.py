"""On a card: launches that start before the one ahead has ended, each of which reads what that one wrote."""

from __future__ import annotations

import pytest
import torch

import normforge
from normforge.families.public import layernorm2d_bwd

pytestmark = pytest.mark.gpu

CALLS = 60
SHAPES = [(1, 64), (7, 4096), (300, 8192), (4096, 1024), (2000, 5137), (64, 65536), (96, 131072), (16384, 512)]


def chain(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, waits: bool) -> None:
    """Norms and a kernel of torch's in turn, all in place."""
    for call in range(CALLS):
        if call % 3 == 0:
            normforge.rmsnorm2d_fwd(x, weight, residual=residual, fadd="pre_add_store", out=x, residual_out=residual)
        elif call % 3 == 1:
            normforge.layernorm2d_fwd(x, weight, weight, out=x)
        else:
            x.mul_(1.5)
        if waits:
            torch.cuda.synchronize()


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_each_call_sees_all_that_the_one_before_wrote(m: int, n: int, graph: bool) -> None:
    x, residual = (torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(n, device="cuda", dtype=torch.bfloat16) + 0.5
    expected, actual = ((x.clone(), residual.clone()) for _ in range(2))
    chain(*expected, weight, waits=True)
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            chain(*actual, weight, waits=False)
        for got, start in zip(actual, (x, residual), strict=True):
            got.copy_(start)
        captured.replay()
    else:
        chain(*actual, weight, waits=False)
    torch.cuda.synchronize()
    assert [torch.equal(got, want) for got, want in zip(actual, expected, strict=True)] == [True, True]


@pytest.mark.parametrize(("m", "n"), [(64, 1024), (4096, 1024), (3000, 4096), (64, 20000), (3000, 20000)])
def test_sums_over_rows_wait_for_all_programs(m: int, n: int) -> None:
    """The launch that adds partial sums up is admitted while the ones ahead of it still write them."""
    x, dy = (torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    saved = normforge.layernorm2d_fwd(x, weight, weight, save_mv=True)
    assert saved.mean is not None
    assert saved.rstd is not None
    found = []
    for _ in range(CALLS):
        found.append(layernorm2d_bwd(dy, x, weight, mean=saved.mean, rstd=saved.rstd, wants=("dx", "dweight", "dbias")))
        # What the next call is given of this memory is not zero.
        torch.full((2 * n * 528,), float("nan"), device="cuda")
    h = (x.double() - saved.mean.double().unsqueeze(-1)) * saved.rstd.double().unsqueeze(-1)
    for name, want in (("dweight", (dy.double() * h).sum(0)), ("dbias", dy.double().sum(0))):
        torch.testing.assert_close(getattr(found[0], name).double(), want, rtol=1e-2, atol=1e-2 * m**0.5)
        assert all(torch.equal(getattr(gradients, name), getattr(found[0], name)) for gradients in found)
