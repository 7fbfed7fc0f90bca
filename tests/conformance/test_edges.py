"""What the table of cases cannot say: bits that repeat, compilations, streams, and a size that no oracle can copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import normforge
from normforge.codegen.tiling import SOME_M
from proving.conformance.suites import TUTORIAL_SHAPE

from ..calling import each_device

each_norm = pytest.mark.parametrize("norm", ["layer", "rms"])

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {"layer": normforge.layer_norm, "rms": normforge.rms_norm}
TORCH: dict[str, Callable[..., torch.Tensor]] = {"layer": functional.layer_norm, "rms": functional.rms_norm}


@each_device
@each_norm
def test_the_gradient_of_a_sum(norm: str, device: str) -> None:
    """`sum` gives a gradient whose strides are all 0, which is no tensor of rows; QuACK's shape is (2, 1024, 256)."""
    shape = (2, 1024, 256) if device == "cuda" else (2, 16, 256)
    x = torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.randn(256, device=device, requires_grad=True)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    gradients = torch.autograd.grad(FUNCTIONS[norm](x, (256,), weight, eps=1e-6).sum(), [x, weight])
    wanted = torch.autograd.grad(TORCH[norm](exact[0], (256,), exact[1], eps=1e-6).sum(), exact)
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-4 * want.abs().max().item())


@pytest.mark.gpu
def test_tutorial_05_beside_torch() -> None:
    """Its inputs, its comparison with torch and its tolerance."""
    x = -2.3 + 0.5 * torch.randn(TUTORIAL_SHAPE, dtype=torch.float16, device="cuda")
    dy = 0.1 * torch.randn_like(x)
    weight, bias = (torch.rand(TUTORIAL_SHAPE[1:], dtype=torch.float16, device="cuda") for _ in range(2))
    results = []
    for layer_norm in (normforge.layer_norm, functional.layer_norm):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        y = layer_norm(leaves[0], TUTORIAL_SHAPE[1:], leaves[1], leaves[2], 1e-5)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=0)


_BITS = [(5, 100), (3, 1024), (2, 5000)]
_BITS_ON_GPU = [(5000, 100), (4096, 1024), (4096, 5120), (999, 8192), (500, 40000), (32744, 4099)]


@pytest.mark.parametrize(
    ("device", "shape"),
    [
        *(("cpu", shape) for shape in _BITS),
        *(pytest.param("cuda", shape, marks=pytest.mark.gpu) for shape in _BITS_ON_GPU),
    ],
    ids=str,
)
@each_norm
def test_two_runs_give_the_same_bits(norm: str, device: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.randn(shape[1], device=device, requires_grad=True)
    leaves, operands = [x, weight], [weight]
    if norm == "layer":
        leaves.append(torch.randn(shape[1], device=device, requires_grad=True))
        operands.append(leaves[-1])
    dy = torch.randn_like(x)

    def once() -> list[torch.Tensor]:
        y = FUNCTIONS[norm](x, shape[1:], *operands, eps=1e-5)
        return [y, *torch.autograd.grad(y, leaves, dy)]

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
def test_a_call_waits_for_the_work_before_it_on_the_current_stream() -> None:
    x = torch.randn(8192, 8192, device="cuda")
    expected = normforge.layernorm2d_fwd(x @ x).y
    stream = torch.Stream("cuda")
    torch.cuda.synchronize()
    with stream:
        y = normforge.layernorm2d_fwd(x @ x).y
    stream.synchronize()
    assert torch.equal(y, expected)


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
    function = normforge.layernorm2d_fwd if norm == "layer" else normforge.rmsnorm2d_fwd
    function(x, out=y)
    assert torch.equal(y[-many:], function(x[-many:].clone()).y)
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
