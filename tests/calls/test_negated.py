"""Tensors whose memory holds the negative of what they stand for: read as what they stand for, by every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge

from ..calling import pieces

N = 32


def drawn(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


ROWS, VECTOR = (3, 4, N), (N,)
FAMILIES: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]]]] = {
    "layer": (
        lambda x, weight, bias, x_bias: normforge.layer_norm(x, (N,), weight, bias, x_bias=x_bias),
        {"x": ROWS, "weight": VECTOR, "bias": VECTOR, "x_bias": VECTOR},
    ),
    "add": (normforge.add_layer_norm, {"x": ROWS, "residual": ROWS, "weight": VECTOR, "bias": VECTOR}),
    "dropped": (
        lambda **given: normforge.add_rms_norm(**given, dropout_p=0.5, dropout_rng=(1, 2)),
        {"x": ROWS, "residual": ROWS, "weight": VECTOR, "x_bias": VECTOR},
    ),
    "modulated": (
        normforge.modulated_layer_norm,
        {
            "x": ROWS,
            "scale": (3, N),
            "shift": (3, N),
            "gate": (3, N),
            "residual": ROWS,
            "weight": VECTOR,
            "bias": VECTOR,
        },
    ),
    "gated": (normforge.gated_layer_norm, {"x": ROWS, "gate": ROWS, "weight": VECTOR, "bias": VECTOR}),
    "group": (
        lambda x, weight, bias: normforge.group_norm(x, 4, weight, bias, activation="silu"),
        {"x": (2, N, 3), "weight": VECTOR, "bias": VECTOR},
    ),
    "group of the last channels": (
        lambda x, weight, bias: normforge.group_norm(x.movedim(-1, 1), 4, weight, bias),
        {"x": (2, 3, N), "weight": VECTOR, "bias": VECTOR},
    ),
}
CASES = [(family, name) for family, (_, sizes) in FAMILIES.items() for name in (*sizes, "dy")]


def results(call: Callable[..., Any], given: dict[str, torch.Tensor], *, negated: str) -> list[torch.Tensor]:
    """Outputs and gradients; the leaf of what is negated is the negative, and so is its gradient."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    passed = dict(leaves)
    if negated in leaves:
        leaves[negated] = (-given[negated]).requires_grad_()
        passed[negated] = torch._neg_view(leaves[negated])
    outputs = pieces(call(**passed))
    dy = [drawn(*output.shape) for output in outputs]
    if negated == "dy":
        dy = [torch._neg_view(-each) for each in dy]
    gradients = dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), dy), strict=True))
    if negated in gradients:
        gradients[negated] = -gradients[negated]
    return [*outputs, *gradients.values()]


@pytest.mark.parametrize(("family", "negated"), CASES)
def test_negated_tensors_are_read_as_what_they_stand_for(family: str, negated: str) -> None:
    """Cold, and warm from calls that were not negated and that were."""
    call, sizes = FAMILIES[family]
    given = {name: drawn(*size) for name, size in sizes.items()}
    want = results(call, given, negated="")
    for _ in range(3):
        torch.testing.assert_close(results(call, given, negated=negated), want, rtol=1e-4, atol=1e-4)


TWO_DIMENSIONAL: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]]]] = {
    "forward": (
        lambda **given: normforge.layernorm2d_fwd(**given, fadd="pre_add_store", fquant="smooth_dynamic", save_mv=True),
        {"x": (4, N), "weight": VECTOR, "bias": VECTOR, "residual": (4, N), "smooth_scale": VECTOR, "x_bias": VECTOR},
    ),
    "backward": (
        lambda **given: normforge.layernorm2d_bwd(**given, wants=("dx", "dweight", "dbias")),
        {"dy": (4, N), "x": (4, N), "weight": VECTOR, "mean": (4,), "rstd": (4,), "dresidual_out": (4, N)},
    ),
    "modulated": (
        lambda **given: normforge.modulated_layernorm2d_fwd(**given, save_mv=True),
        {"x": (4, N), "scale": (4, N), "shift": (4, N), "gate": (4, N), "residual": (4, N), "weight": VECTOR},
    ),
    "gated": (normforge.gated_layernorm2d_fwd, {"x": (4, N), "gate": (4, N), "weight": VECTOR, "bias": VECTOR}),
    "quantised": (
        lambda **given: normforge.quantised_layer_norm(**given, fquant="static"),
        {"x": (4, N), "weight": VECTOR, "bias": VECTOR, "residual": (4, N), "y_scale": (1,)},
    ),
    "quantised by column": (
        lambda **given: normforge.quantised_layer_norm(**given, fquant="static"),
        {"x": (4, N), "weight": VECTOR, "y_scale": VECTOR},
    ),
    "quantised, bounded": (
        lambda **given: normforge.quantised_rms_norm(**given, out_dtype=torch.float8_e4m3fn),
        {"x": (4, N), "weight": VECTOR, "scale_ub": (1,)},
    ),
}


@pytest.mark.parametrize(
    ("family", "negated"), [(family, name) for family, (_, sizes) in TWO_DIMENSIONAL.items() for name in sizes]
)
def test_so_are_those_of_the_2d_functions(family: str, negated: str) -> None:
    call, sizes = TWO_DIMENSIONAL[family]
    given = {
        name: drawn(*size).abs() if name in ("y_scale", "scale_ub") else drawn(*size) for name, size in sizes.items()
    }
    want = [each for each in call(**given) if each is not None]
    for _ in range(3):
        found = [each for each in call(**{**given, negated: torch._neg_view(-given[negated])}) if each is not None]
        for one, other in zip(found, want, strict=True):
            assert torch.equal(one.float(), other.float())
