"""What the table of cases cannot say: bits that repeat, compilations, single values, and sizes no oracle can copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import normforge
from normforge.codegen.tiling import SOME_M
from proving.cases import cases, gradients, operands
from proving.conformance.case import BF16, FP16

from ..calling import FORWARD, each_norm

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {"layer": normforge.layer_norm, "rms": normforge.rms_norm}
TORCH: dict[str, Callable[..., torch.Tensor]] = {"layer": functional.layer_norm, "rms": functional.rms_norm}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(5000, 100), (4096, 1024), (4096, 5120), (999, 8192), (500, 40000), (32744, 4099)], ids=str
)
@each_norm
def test_two_runs_give_the_same_bits(norm: str, shape: tuple[int, int]) -> None:
    (case,) = cases("plain", vary=(), norm=norm, shape=shape, without=("residual", "x_bias"), dtype=BF16)
    given = operands(case, "cuda")
    dy = torch.randn_like(given["x"])

    def once() -> list[torch.Tensor]:
        outputs = case.run(given)
        return [*outputs, *gradients(outputs, given, [dy]).values()]

    first = once()
    for _ in range(3):
        for a, b in zip(first, once(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [103, 4103, 40009])
def test_compilations_do_not_depend_on_m(n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a call of each class of M (few, some, many rows) no M compiles anything, forward or backward."""
    # Triton's own cache on disk may hold what an earlier run compiled, and a kernel from there is none compiled.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def step(m: int) -> None:
        x = torch.randn(m, n, device="cuda", requires_grad=True)
        torch.autograd.backward([normforge.layer_norm(x, (n,)).sum()])
        normforge.rmsnorm2d_fwd(x.detach(), fquant="dynamic")

    for m in (2, 1000, 3000):
        step(m)
    compiled = sorted(path.name for path in tmp_path.iterdir())
    assert compiled
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    for m in (1, 3, 4, 5, 16, 37, 64, 255, 256, 257, 999, 1001, 2048, 2049, 4096):
        step(m)
    torch.cuda.synchronize()
    assert sorted(path.name for path in tmp_path.iterdir()) == compiled


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 64, 4096, 65536])
@each_norm
def test_more_than_2_to_the_31_elements(norm: str, n: int) -> None:
    """Every element is written, and rows at the end of memory are what the same rows are by themselves."""
    rows = (1 << 31) // n + 5
    # Fewer may have another tile, which adds a row up in another order.
    many = SOME_M + 1
    x = torch.zeros(rows, n, dtype=torch.float16, device="cuda")
    x[-many:] = torch.randn(many, n, dtype=torch.float16, device="cuda")
    y = torch.full_like(x, float("nan"))
    FORWARD[norm](x, out=y)
    assert torch.equal(y[-many:], FORWARD[norm](x[-many:].clone()).y)
    # NaN shows in a sum, which needs no M×N of its own.
    assert not torch.stack([part.sum(dtype=torch.float32) for part in torch.split(y, 1 << 24)]).isnan().any()
    assert not y[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 4096, 65536])
@each_norm
def test_the_gradient_of_more_than_2_to_the_31_elements(norm: str, n: int) -> None:
    rows = (1 << 31) // n + 5
    x = torch.zeros(rows, n, dtype=torch.bfloat16, device="cuda")
    x[-300:] = torch.randn(300, n, dtype=torch.bfloat16, device="cuda")
    dy = torch.zeros_like(x)
    dy[-300:] = torch.randn_like(x[-300:])
    weight = torch.randn(n, device="cuda")
    found = []
    for inputs, gradient in ((x, dy), (x[-300:].clone(), dy[-300:].clone())):
        leaves = [inputs.requires_grad_(), weight.clone().requires_grad_()]
        found.append(torch.autograd.grad(FUNCTIONS[norm](leaves[0], (n,), leaves[1], eps=1e-5), leaves, gradient))
    (dx, dweight), (few_dx, few_dweight) = found
    torch.testing.assert_close(dx[-300:], few_dx, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(dweight, few_dweight, rtol=1e-4, atol=1e-3)
    assert not dx[0].any()
    assert not dx[rows // 2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 1500, 5137, 33000])
@each_norm
def test_a_row_stride_times_a_row_past_int32(norm: str, n: int) -> None:
    """Other libraries' addresses wrapped around. Forward, with an output as far apart, and backward."""
    stride = (1 << 31) // 4 + 8

    def spread() -> torch.Tensor:
        memory = torch.empty(5 * stride + n, dtype=FP16, device="cuda")
        return memory.as_strided((6, n), (stride, 1))

    x, out, dy = spread(), spread(), spread()
    x.copy_(torch.randn(6, n, dtype=FP16, device="cuda"))
    dy.copy_(torch.randn(6, n, dtype=FP16, device="cuda"))
    FORWARD[norm](x, out=out, eps=1e-5)
    leaf, exact = x.detach().requires_grad_(), x.double().requires_grad_()
    y, want = (functions[norm](rows, (n,), eps=1e-5) for functions, rows in ((FUNCTIONS, leaf), (TORCH, exact)))
    (dx,) = torch.autograd.grad(y, leaf, dy)
    (exact_dx,) = torch.autograd.grad(want, exact, dy.double())
    for got, of in ((y, want), (out, want), (dx, exact_dx)):
        torch.testing.assert_close(got.double(), of, rtol=1e-3, atol=1e-3)
