"""Modulated and gated calls of a known kind: what one of another kind is, and which kernels they take."""

from __future__ import annotations

import pytest
import torch

import normforge
from normforge.calls import road
from normforge.errors import ConflictError, ShapeError
from normforge.families.gated import row as gated
from proving.cases import Case, Tensors, cases, close, doubled, formula, operands

from ..calling import each_device, same_bits

pytestmark = pytest.mark.usefixtures("nothing_known")

N = 48
(MODULATED,) = cases("modulated", vary=(), shape=(2, 3, N), without=("weight", "bias"))
(GATED,) = cases("gated", vary=(), shape=(3, N), norm="rms")


def hold(case: Case, given: Tensors) -> None:
    """Hold outputs of a call against the formula."""
    for found, wanted in zip(case.run(given), formula(case, doubled(given)), strict=True):
        close("output", found, wanted, 2e-5)


def test_a_known_call_whose_groups_do_not_fit_is_refused() -> None:
    x, gate, weight = torch.randn(3, N), torch.randn(3, N), torch.randn(3, N)
    options = road.options_of(
        gated.CALLS, "rms", {"gating": "after_norm", "activation": "silu", "eps": 1e-6, "fquant": "none",
                             "out_dtype": None, "save_mv": False}
    )  # fmt: skip
    for _ in range(2):
        road.launched(gated.CALLS, (x, gate, weight, None), options)
    with pytest.raises(ShapeError, match=r"weight has shape \(3, 48\) and x \(2, 48\)"):
        road.launched(gated.CALLS, (x[:2], gate[:2], weight, None), options)


def test_a_known_call_whose_operands_do_not_fit_is_refused() -> None:
    for case in (MODULATED, MODULATED.but(without=("gate", "residual", "weight", "bias")), GATED):
        given = operands(case)
        for _ in range(2):
            case.run(given)
        for name in set(given) - {"x", "residual", "weight"}:
            # Not one tensor for several operands, and none without a gradient, which are kinds of their own.
            for rows in {4, 3, 1} - {len(given[name])}:
                with pytest.raises(ShapeError, match=name):
                    case.run({**given, name: torch.randn(rows, N, requires_grad=True)})
        with pytest.raises(ConflictError):
            case.function(**given, **{**case.arguments, "eps": float("nan")})


@each_device
def test_a_row_has_the_same_bits_whatever_it_shares_its_modulation_with(device: str) -> None:
    x, scale, shift = torch.randn(6, N, device=device), *torch.randn(2, N, device=device)
    for_all = normforge.modulated_layer_norm(x, scale, shift)
    of_each = normforge.modulated_layer_norm(x, scale.expand(6, N), shift.expand(6, N).contiguous())
    of_samples = normforge.modulated_layer_norm(x.view(2, 3, N), scale.expand(2, N), shift.expand(2, N).contiguous())
    alone = normforge.modulated_layer_norm(x[2], scale, shift)
    assert same_bits(for_all, of_each)
    assert same_bits(for_all, of_samples.view(6, N))
    assert same_bits(for_all[2], alone)
