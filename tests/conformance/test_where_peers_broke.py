"""Defects that other libraries' kernels have had, each a test: none of them is in these kernels."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import normforge
from normforge.errors import NormforgeError
from proving.conformance import tolerances
from proving.conformance.case import BF16, E4M3FN, FP16, FP32, INT8, Case, Norm, Y
from proving.conformance.run import run
from proving.conformance.suites import QUACK_INPUTS

from ..calling import FORWARD, each_device, each_norm


def _passes(case: Case, device: str) -> None:
    outcome = run(case, torch.device(device), 0)
    assert outcome.ok, str(outcome)


def _case(norm: Norm, shape: tuple[int, ...], x: torch.dtype, **fields: Any) -> Case:
    return Case("peers", norm, shape, x, QUACK_INPUTS, tolerances.quack(x, shape[0], x), weight=x, **fields)


@each_device
@each_norm
@pytest.mark.parametrize("out_dtype", [BF16, INT8, E4M3FN], ids=str)
def test_a_row_of_769_does_not_corrupt_what_follows(norm: str, out_dtype: torch.dtype, device: str) -> None:
    """The kernel of N = 1024 stored its whole tile into the rows behind."""
    memory = torch.zeros(7, 769 + 512, device=device).to(out_dtype)
    memory.view(torch.uint8).fill_(0x2A)
    before = memory.clone()
    x = torch.randn(7, 769, dtype=BF16, device=device)
    modes: dict[str, Any] = {} if out_dtype is BF16 else {"fquant": "dynamic", "out_dtype": out_dtype}
    fresh = FORWARD[norm](x, **modes).y
    FORWARD[norm](x, **modes, out=memory[:, :769])
    assert torch.equal(memory[:, :769].view(torch.uint8), fresh.view(torch.uint8))
    assert torch.equal(memory[:, 769:].view(torch.uint8), before[:, 769:].view(torch.uint8))


@each_device
@pytest.mark.parametrize("n", [4097, 5000, 6143, 6144])
@pytest.mark.parametrize("arriving", [(), (Y,)], ids=["forward", "backward"])
def test_rows_of_4097_to_6144(n: int, arriving: tuple[str, ...], device: str) -> None:
    """Their launch aborted."""
    for norm, x in product(Norm, (FP16, FP32)):
        _passes(_case(norm, (3, n), x, arriving=arriving), device)


@pytest.mark.parametrize(
    ("device", "n"),
    [
        *(("cpu", n) for n in (8193, 10240, 20001)),
        *(pytest.param("cuda", n, marks=pytest.mark.gpu) for n in (8193, 10240, 20001, 65536, 262144, 1048576)),
    ],
    ids=str,
)
@pytest.mark.parametrize("out", [INT8, E4M3FN], ids=str)
def test_rows_beyond_8192_are_quantised(n: int, out: torch.dtype, device: str) -> None:
    """They were refused."""
    for norm in Norm:
        _passes(_case(norm, (2, n), BF16, out=out, fquant="smooth_dynamic", smooth_scale=FP32), device)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 1500, 5137, 33000])
@each_norm
def test_a_row_stride_times_a_row_past_int32(norm: str, n: int) -> None:
    """Addresses wrapped around. Forward, with an output as far apart, and backward."""
    stride = (1 << 31) // 4 + 8

    def spread() -> torch.Tensor:
        memory = torch.empty(5 * stride + n, dtype=FP16, device="cuda")
        return memory.as_strided((6, n), (stride, 1))

    x, out, dy = spread(), spread(), spread()
    x.copy_(torch.randn(6, n, dtype=FP16, device="cuda"))
    dy.copy_(torch.randn(6, n, dtype=FP16, device="cuda"))
    FORWARD[norm](x, out=out, eps=1e-5)
    ours = normforge.layer_norm if norm == "layer" else normforge.rms_norm
    theirs = functional.layer_norm if norm == "layer" else functional.rms_norm
    leaf, exact = x.detach().requires_grad_(), x.double().requires_grad_()
    y, want = ours(leaf, (n,), eps=1e-5), theirs(exact, (n,), eps=1e-5)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    (exact_dx,) = torch.autograd.grad(want, exact, dy.double())
    for got, of in ((y, want), (out, want), (dx, exact_dx)):
        torch.testing.assert_close(got.double(), of, rtol=1e-3, atol=1e-3)


@each_device
@pytest.mark.parametrize("out_dtype", [INT8, E4M3FN], ids=str)
@pytest.mark.parametrize("n", [1, 100, 1024, 5000])
@each_norm
def test_a_row_of_zeros_is_not_divided_by_zero(norm: str, n: int, out_dtype: torch.dtype, device: str) -> None:
    x = torch.randn(4, n, dtype=FP16, device=device)
    x[1] = 0.0
    output = FORWARD[norm](x, fquant="dynamic", out_dtype=out_dtype)
    assert output.y_scale is not None
    assert output.y_scale[1] == 1.0
    assert not output.y[1].float().any()
    assert output.y_scale.isfinite().all()
    assert output.y.float().isfinite().all()


@each_device
@pytest.mark.parametrize("rounding", ["nearest", "truncate"])
@pytest.mark.parametrize(
    ("scale_dtype", "weight", "past"),
    [(FP32, 1.0, 126.9), (BF16, 1.0, 127.2), (FP16, 1.25e-6, 0.0)],
    ids=["fp32", "bf16", "subnormal_fp16"],
)
def test_int8_saturates(scale_dtype: torch.dtype, weight: float, past: float, rounding: str, device: str) -> None:
    """Divided by a scale that was rounded down, a row's largest value is past 127; 127.6 as int8 was -128."""
    rows = torch.arange(300, device=device)
    x = torch.randn(300, 64, device=device)
    x[rows, rows % 64] = 40.0 * (1 - 2.0 * (rows % 2))
    weights = torch.full((64,), weight, device=device)
    output = normforge.rmsnorm2d_fwd(x, weights, fquant="dynamic", scale_dtype=scale_dtype, rounding=rounding)
    assert output.y_scale is not None
    z = functional.rms_norm(x.double(), (64,), weights.double(), eps=1e-6)
    ratio = z / output.y_scale.double().unsqueeze(-1)
    assert ratio.abs().max() > past
    wanted = ratio.clamp(-127, 127)[rows, rows % 64]
    assert (output.y[rows, rows % 64].double() - wanted).abs().max() <= 1
    assert output.y.min() >= -127


@each_device
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@each_norm
def test_statistics_are_not_kept_in_16_bits(norm: str, dtype: torch.dtype, device: str) -> None:
    x = (torch.randn(5, 1000, device=device) + 3).to(dtype)
    output = FORWARD[norm](x, save_mv=True, eps=1e-5)
    exact = x.double()
    mean = exact.mean(-1) if norm == "layer" else torch.zeros(5, dtype=torch.float64, device=device)
    rstd = ((exact - mean.unsqueeze(-1)).square().mean(-1) + 1e-5).rsqrt()
    for got, want in ((output.mean, mean), (output.rstd, rstd)):
        if got is not None:
            assert got.dtype is FP32
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
    assert (output.mean is None) == (norm == "rms")
    assert output.rstd is not None


@each_device
@pytest.mark.parametrize("n", [100, 1024, 5000])
@each_norm
def test_the_callers_dy_is_not_written_to(norm: str, n: int, device: str) -> None:
    ours = normforge.layer_norm if norm == "layer" else normforge.rms_norm
    x = torch.randn(3, n, dtype=BF16, device=device, requires_grad=True)
    weight = torch.randn(n, device=device, requires_grad=True)
    dy = torch.randn(3, n + 4, dtype=BF16, device=device)
    before = dy.clone()
    torch.autograd.backward([ours(x, (n,), weight)], [dy[:, :n]])
    assert torch.equal(dy, before)


@each_device
@each_norm
def test_the_callers_outputs_are_used(norm: str, device: str) -> None:
    """A caller's residual_out was ignored."""
    x, residual = (torch.randn(3, 1000, dtype=BF16, device=device) for _ in range(2))
    out, residual_out = (torch.full_like(x, float("nan")) for _ in range(2))
    output = FORWARD[norm](x, residual=residual, fadd="pre_add_store", out=out, residual_out=residual_out)
    fresh = FORWARD[norm](x, residual=residual, fadd="pre_add_store")
    assert output.y is out
    assert output.residual_out is residual_out
    assert torch.equal(out, fresh.y)
    assert torch.equal(residual_out, (x.float() + residual.float()).to(BF16))


@each_device
@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("arriving", [(), (Y,)], ids=["forward", "backward"])
def test_rows_of_3584_that_start_anywhere(offset: int, arriving: tuple[str, ...], device: str) -> None:
    """As a slice of wider rows: vector loads of what was not aligned faulted."""
    for norm, x in product(Norm, (BF16, FP32)):
        fields: dict[str, Any] = {"row_stride": 3584 + 13, "offset": offset, "arriving": arriving}
        _passes(_case(norm, (2 if device == "cpu" else 19, 3584), x, **fields), device)


@pytest.mark.gpu
def test_a_new_number_of_rows_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for m in (1, 1000):
        normforge.layernorm2d_fwd(torch.randn(m, 1031, device="cuda"))
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    for m in range(2, 600, 7):
        normforge.layernorm2d_fwd(torch.randn(m, 1031, device="cuda"))


_REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("int8 without quantisation", {"out_dtype": INT8}),
    ("fp8 without quantisation", {"out_dtype": E4M3FN}),
    ("quantised to fp16", {"fquant": "dynamic", "out_dtype": FP16}),
    ("truncated fp8", {"fquant": "dynamic", "out_dtype": E4M3FN, "rounding": "truncate"}),
    ("truncated and not quantised", {"rounding": "truncate"}),
    ("a smooth scale that is missing", {"fquant": "smooth_dynamic"}),
    ("a residual that is missing", {"fadd": "pre_add_store"}),
    ("a residual that nothing adds", {"residual": torch.zeros(3, 100)}),
    ("a scale dtype without a scale", {"scale_dtype": FP16}),
    ("an unknown mode", {"fquant": "static"}),
    ("fp64", {"x": torch.zeros(3, 100, dtype=torch.float64)}),
    ("weight in fp64", {"weight": torch.zeros(100, dtype=torch.float64)}),
    ("weight of another length", {"weight": torch.zeros(99)}),
    ("columns that do not adjoin", {"x": torch.zeros(100, 3).t()}),
)


@each_device
@pytest.mark.parametrize("arguments", [of for _, of in _REFUSED], ids=[name for name, _ in _REFUSED])
@each_norm
def test_what_cannot_be_computed_is_refused_and_not_left_unwritten(
    norm: str, arguments: dict[str, Any], device: str
) -> None:
    placed = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    with pytest.raises(NormforgeError):
        FORWARD[norm](**{"x": torch.randn(3, 100, device=device), **placed})
