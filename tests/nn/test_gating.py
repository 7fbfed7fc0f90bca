"""Modulated and gated norms: rows that are read where they are, rows that are hard, and modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from normforge.calls import road
from proving.cases import Case, cases, check, close, doubled, formula, operands

from ..calling import each_device, each_norm

FUNCTIONS: dict[str, Any] = {"layer": normforge.gated_layer_norm, "rms": normforge.gated_rms_norm}
WITHOUT = ("weight", "bias")


@each_device
def test_many_short_rows_of_heads(device: str) -> None:
    """As Gated DeltaNet has them: several rows a program, of heads of a projection that are walked where they are."""
    tokens, heads, n = 23, 3, 24
    projected = torch.randn(tokens, 2 * heads * n, device=device)
    x, gate = (part.view(1, tokens, heads, n).requires_grad_() for part in projected.chunk(2, -1))
    with torch.no_grad():
        assert all(row is tensor for row, tensor in zip(road.as_operands((x, gate), 1), (x, gate), strict=True))
    (case,) = cases("gated", vary=(), norm="rms")
    check(case, {"x": x, "gate": gate, "weight": (torch.rand(n, device=device) + 0.5).requires_grad_()})


@each_device
@pytest.mark.parametrize("n", [100, 600, pytest.param(33000, marks=pytest.mark.thorough)])
def test_chunks_of_one_tensor_are_read_where_they_are(n: int, device: str) -> None:
    """As DiT's modulation leaves them, and views of wider rows; nothing is copied, and each pipeline has such rows."""
    six = torch.randn(2, 6 * n, device=device)
    shift, scale, gate = six.chunk(6, -1)[:3]
    x, residual = torch.randn(2, 2, 2 * n, device=device).chunk(2, -1)
    given = {"x": x, "scale": scale, "shift": shift, "gate": gate, "residual": residual}
    (case,) = cases("modulated", vary=(), without=("weight", "bias"))
    rows = road.as_operands((*given.values(), None, None), 1)
    assert all(row is tensor for row, tensor in zip(rows, given.values(), strict=False))
    for output, its in zip(case.run(given), formula(case, doubled(given)), strict=True):
        close("output", output, its.detach(), 2e-5)


def test_what_kernels_cannot_walk_is_copied() -> None:
    x, scale, shift = torch.randn(40, 3, 2).transpose(0, 2), torch.randn(40, 2).T, torch.randn(80)[::2]
    y = normforge.modulated_rms_norm(x, scale, shift)
    assert torch.equal(y, normforge.modulated_rms_norm(x.contiguous(), scale.contiguous(), shift.contiguous()))


@each_device
@pytest.mark.parametrize(
    "case", cases("gated", vary=("norm", "activation", "norm_before_gate"), without=WITHOUT), ids=str
)
def test_rows_that_are_hard(case: Case, device: str) -> None:
    """All equal, far from 0, a gate far below 0, and infinities and NaNs that stay in their own rows."""
    n = 40
    x, gate = torch.randn(7, n, device=device), torch.randn(7, n, device=device)
    x[0] = 3.0
    x[1] = 1e4 + torch.randn(n, device=device)
    x[2] *= 1e18
    gate[3] = -200.0
    gate[4] = 90.0
    x[5, 3], gate[6, 2] = float("inf"), float("nan")
    given = {"x": x, "gate": gate}
    (y,), (wanted,) = case.run(given), formula(case, doubled(given))
    assert not y[5:].isfinite().all(-1).any()
    # Of 1e4 fp32 holds no more than the noise beside it to a thousandth.
    for row in range(5):
        tolerance = 2e-3 if row in (0, 1) and case["norm"] == "layer" else 2e-5
        close(f"row {row}", y[row], wanted[row].detach(), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases("gated", vary=("norm", "norm_before_gate"), dtype=torch.bfloat16), ids=str)
def test_short_rows_by_the_hundred_thousand(case: Case) -> None:
    for n, group_size in ((64, None), (128, None), (256, 64)):
        many = case.but(shape=(262144 * 64 // n, n), group_size=group_size)
        check(many, operands(many, "cuda"))


@each_norm
def test_modules_are_the_functions_with_parameters(norm: str) -> None:
    x, gate = torch.randn(2, 3, 48).chunk(2, -1)
    options: dict[str, Any] = {"activation": "sigmoid", "norm_before_gate": False, "group_size": 8, "eps": 1e-3}
    made: Any = normforge.GatedLayerNorm if norm == "layer" else normforge.GatedRMSNorm
    module = made(24, **options)
    assert torch.equal(module.weight, torch.ones(24))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    assert torch.equal(module(x, gate), FUNCTIONS[norm](x, gate, *module.parameters(), **options))
    assert repr(module).endswith("Norm(24, eps=0.001, group_size=8, norm_before_gate=False, activation='sigmoid')")


def test_modules_have_the_names_of_the_fields_own() -> None:
    """Of mamba_ssm's RMSNormGated, whose state dicts are loaded: a weight and nothing else."""
    assert [name for name, _ in normforge.GatedRMSNorm(24).named_parameters()] == ["weight"]
    assert [name for name, _ in normforge.GatedLayerNorm(24).named_parameters()] == ["weight", "bias"]
    assert [name for name, _ in normforge.GatedLayerNorm(24, bias=False).named_parameters()] == ["weight"]
    assert repr(normforge.GatedRMSNorm(24)) == "normforge.GatedRMSNorm(24, eps=1e-06)"
    assert normforge.GatedRMSNorm(24, dtype=torch.float16, device="meta").weight.is_meta
