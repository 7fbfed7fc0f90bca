"""Tensors whose memory holds the negative of what they stand for: read as what they stand for, by every family."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

import normforge
from proving.cases import Case, cases, gradients, operands

N = 32


def drawn(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


VECTOR = (N,)
ROWS, IMAGES = (2, 3, N), (2, 8, 5)
FAMILIES: dict[str, Case] = {
    **{case.family: case for case in cases("plain", "modulated", "gated", vary=(), shape=ROWS)},
    **{case.family: case for case in cases("group", vary=(), shape=IMAGES, activation="silu")},
    "plain, no residual": cases("plain", vary=(), shape=ROWS, without=("residual",))[0],
    "dropout": cases("plain", vary=(), shape=ROWS, norm="rms")[0].but(dropout_p=0.5, dropout_rng=(1, 2)),
    "group, channels last": cases("group", vary=(), shape=IMAGES, layout="channels last")[0],
}


def results(case: Case, negated: str) -> list[torch.Tensor]:
    """Outputs and gradients; the leaf of what is negated is the negative, and so is its gradient."""
    leaves = operands(case)
    passed = dict(leaves)
    if negated in leaves:
        leaves[negated] = (-leaves[negated].detach()).requires_grad_()
        passed[negated] = torch._neg_view(leaves[negated])
    outputs = case.run(passed)
    dy = [drawn(*output.shape) for output in outputs]
    if negated == "dy":
        dy = [torch._neg_view(-each) for each in dy]
    found = gradients(outputs, leaves, dy)
    if negated in found:
        found[negated] = -found[negated]
    return [*outputs, *found.values()]


@pytest.mark.parametrize("case", FAMILIES.values(), ids=FAMILIES)
def test_negated_tensors_are_read_as_what_they_stand_for(case: Case) -> None:
    """Warm from calls that were not negated and that were."""
    want = results(case, negated="")
    for negated in (*operands(case), "dy"):
        for _ in range(2):
            torch.testing.assert_close(results(case, negated), want, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(("call", "sizes"), TWO_DIMENSIONAL.values(), ids=TWO_DIMENSIONAL)
def test_so_are_those_of_the_2d_functions(call: Callable[..., Any], sizes: dict[str, tuple[int, ...]]) -> None:
    given = {name: drawn(*size) for name, size in sizes.items()}
    given |= {name: given[name].abs() for name in ("y_scale", "scale_ub") if name in given}
    want = [each for each in call(**given) if each is not None]
    for negated, _ in product(given, range(2)):
        found = [each for each in call(**{**given, negated: torch._neg_view(-given[negated])}) if each is not None]
        for one, other in zip(found, want, strict=True):
            assert torch.equal(one.float(), other.float()), negated
