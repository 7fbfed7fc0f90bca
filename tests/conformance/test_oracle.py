"""The oracle beside two others: torch's own operators in fp64, and normforge's reference."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional

from normforge import reference
from proving.conformance import oracle
from proving.conformance.case import BF16, E4M3FN, E4M3FNUZ, E5M2, FP16, FP32, INT8, Case, Norm
from proving.conformance.suites import QUACK_INPUTS
from proving.conformance.tolerances import CK_TILE

_M, _N = 5, 37

each_norm = pytest.mark.parametrize("centres", [True, False], ids=["LayerNorm", "RMSNorm"])


def _same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@each_norm
def test_it_is_torchs_operator_and_its_gradients(centres: bool) -> None:
    x, residual, weight, bias = _leaf(_M, _N), _leaf(_M, _N), _leaf(_N), _leaf(_N)
    dy, dtotal = torch.randn(_M, _N, dtype=torch.float64), torch.randn(_M, _N, dtype=torch.float64)
    total = x + residual
    if centres:
        y = functional.layer_norm(total, (_N,), weight, bias, 1e-5)
    else:
        y = functional.rms_norm(total, (_N,), weight, 1e-5) + bias
    dx, dweight, dbias = torch.autograd.grad([y, total], [x, weight, bias], [dy, dtotal])

    found = oracle.forward(x, centres=centres, eps=1e-5, weight=weight, bias=bias, residual=residual)
    _same(found.z, y)
    back = oracle.backward(found.s, found.mean, found.rstd, centres=centres, dy=dy, dresidual_out=dtotal, weight=weight)
    for got, want in ((back.dx, dx), (back.dweight, dweight), (back.dbias, dbias)):
        _same(got, want)


@each_norm
@pytest.mark.parametrize(("out", "scale"), [*product((INT8, E4M3FN, E4M3FNUZ, E5M2), (FP32, FP16))], ids=str)
def test_it_is_the_reference_of_normforge(centres: bool, out: torch.dtype, scale: torch.dtype) -> None:
    x, residual = torch.randn(_M, _N, dtype=FP16), torch.randn(_M, _N, dtype=FP16)
    x[1], residual[1] = 0.0, 0.0
    weight, x_bias, smooth = torch.randn(_N), torch.randn(_N, dtype=FP16), torch.rand(_N) - 0.5
    x_bias[:] = x_bias[0]
    operands: dict[str, Any] = {"weight": weight, "residual": residual, "x_bias": x_bias, "smooth_scale": smooth}
    function: Any = reference.layernorm2d_fwd if centres else reference.rmsnorm2d_fwd
    want = function(
        x,
        **operands,
        eps=1e-5,
        fadd="pre_add_store",
        fquant="smooth_dynamic",
        out_dtype=out,
        scale_dtype=scale,
        save_mv=True,
    )
    got = oracle.forward(x, centres=centres, eps=1e-5, stores=True, quantised=out, scale_dtype=scale, **operands)
    assert got.residual_out is not None
    assert got.y_scale is not None
    assert want.residual_out is not None
    assert want.y_scale is not None
    assert want.rstd is not None
    _same(got.z, want.z)
    assert torch.equal(got.residual_out, want.residual_out)
    assert torch.equal(got.y_scale, want.y_scale)
    torch.testing.assert_close(got.rstd.squeeze(-1).float(), want.rstd)
    q = oracle.quantise(got.z / got.y_scale.double().unsqueeze(-1), out)
    assert torch.equal(q.float(), want.y.float())


@each_norm
@pytest.mark.parametrize(("x", "weight", "y"), [(BF16, FP32, FP32), (FP32, BF16, BF16)], ids=["Llama", "T5"])
def test_rows_are_rounded_before_the_weight_as_models_do(
    centres: bool, x: torch.dtype, weight: torch.dtype, y: torch.dtype
) -> None:
    """As `weight * h.to(dtype)`, with autograd through it; h is fp64 here."""
    half = BF16
    leaf, factor = torch.randn(_M, _N).to(x).double().requires_grad_(), torch.randn(_N).to(weight).double()
    factor.requires_grad_()
    mean = leaf.mean(-1, keepdim=True) if centres else torch.zeros(_M, 1)
    h = (leaf - mean) * ((leaf - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    dy = torch.randn(_M, _N, dtype=torch.float64)
    expected = factor * h.to(half).double()
    dx, dfactor = torch.autograd.grad(expected, (leaf, factor), dy)

    given: dict[str, Any] = {"centres": centres, "weight": factor.detach(), "rounds_first": half}
    found = oracle.forward(leaf.detach(), eps=1e-5, **given)
    _same(found.z, expected)
    back = oracle.backward(found.s, found.mean, found.rstd, dy=dy, **given)
    # Autograd casts the gradient of h to 16 bits on its way back.
    torch.testing.assert_close(back.dx, dx, rtol=0.02, atol=0.02)
    _same(back.dweight, dfactor)
    case = Case("any", Norm.RMS, (_M, _N), x, QUACK_INPUTS, CK_TILE, weight=weight, out=y, cast="before_weight")
    assert case.rounds_first is half


def test_rows_of_zeros_have_a_scale_of_1() -> None:
    found = oracle.forward(torch.zeros(2, 8), centres=False, eps=1e-5, quantised=INT8)
    assert found.y_scale is not None
    assert found.y_scale.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("value", "nearest", "truncated"), [(126.5, 126, 126), (127.6, 127, 127), (-127.6, -127, -127), (-3.5, -4, -3)]
)
def test_int8_is_rounded_to_even_and_saturated(value: float, nearest: int, truncated: int) -> None:
    ratio = torch.tensor([value], dtype=torch.float64)
    assert oracle.quantise(ratio, INT8).tolist() == [nearest]
    assert oracle.quantise(ratio, INT8, "truncate").tolist() == [truncated]
