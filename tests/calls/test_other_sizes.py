"""Calls of a known kind, of other sizes, numbers and addresses: nothing is checked or chosen, and bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import normforge
from normforge.selection import dispatch
from proving.cases import LAYOUTS, Case, cases, gradients, operands

from ..calling import BACKWARD, FORWARD, backward_operands, pieces, same_bits

N = 48
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# A call of so many rows, samples or tokens.
Call = Callable[[int], Any]
STORES: dict[str, Any] = {"fadd": "pre_add_store"}


def rows(m: int) -> torch.Tensor:
    return torch.randn(m, N, generator=torch.Generator().manual_seed(m))


def vector() -> torch.Tensor:
    return torch.linspace(0.5, 1.5, N)


def called(case: Case, arriving: str | None = None) -> Call:
    """Outputs, and gradients if some arrive: fixed numbers in some layout."""

    def call(m: int) -> tuple[torch.Tensor, ...]:
        own = case.but(shape=(m, *case["shape"][1:]))
        given = operands(own, seed=m)
        outputs = own.run(given)
        if arriving is None:
            return outputs
        numbers = [torch.linspace(-1, 1, each.numel()).view(each.shape).to(each.dtype) for each in outputs]
        return (*outputs, *gradients(outputs, given, [LAYOUTS[arriving](each) for each in numbers]).values())

    return call


def forward(norm: str, **modes: Any) -> Call:
    """A 2d function, with a residual and outputs of its own where a mode adds."""

    def call(m: int) -> Any:
        given = {"residual": rows(m), "residual_out": torch.empty(m, N)} if "fadd" in modes else {}
        return FORWARD[norm](rows(m), vector(), **given, **modes)

    return call


def dropped(m: int) -> Any:
    """Of another p and state for each m."""
    return forward("layer", **STORES, dropout_p=1 / (m + 1), dropout_rng=(m, 2))(m)


def backward(norm: str, m: int) -> Any:
    torch.manual_seed(m)
    return BACKWARD[norm](**backward_operands(norm, m))


def heads(m: int) -> Any:
    """Four of six heads, and two in place."""
    packed = rows(m * 6).view(m, 6, N)
    return normforge.rmsnorm2d_fwd(packed[:, :4]).y, normforge.rmsnorm2d_fwd(packed[:, 4:], out=packed[:, 4:]).y


def scaled(form: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    return lambda m: normforge.rmsnorm2d_fwd(rows(m).to(FP8), x_scale=form(rows(m).abs()), out_dtype=BF16)


BARE = ("gate", "residual", "weight", "bias")
(PLAIN, MODULATED, GATED), (GROUP,) = (
    cases("plain", "modulated", "gated", vary=(), shape=(3, N)),
    cases("group", vary=()),
)
MODULATED = MODULATED.but(shape=(2, 16, N), without=BARE)
# By name: the call, sizes that may make a kind known each, and sizes of which nothing is new then.
CALLS: dict[str, tuple[Call, tuple[int, ...], tuple[int, ...]]] = {
    **{f"{norm}, plain": (forward(norm), (3,), (1, 7, 300)) for norm in FORWARD},
    "statistics": (forward("layer", save_mv=True), (3,), (1, 7)),
    "quantised sum": (forward("rms", **STORES, fquant="dynamic"), (3,), (1, 7)),
    "dropout": (dropped, (3,), (8, 1)),
    "heads": (heads, (3, 1), (2, 4)),
    "fp8, a scale a row": (scaled(lambda x: x[:, 0].contiguous()), (3,), (7, 2)),
    "fp8, a column of scales": (scaled(lambda x: x[:, :1].contiguous()), (3,), (7, 2)),
    "fp8, one scale": (scaled(lambda x: x.flatten()[5:6]), (3,), (7, 2)),
    "quantised groups": (lambda m: normforge.quantised_rms_norm(rows(m), vector(), group_size=32), (3,), (7, 1)),
    **{f"{norm}, backward": (partial(backward, norm), (3,), (7, 2)) for norm in BACKWARD},
    **{str(case): (called(case, "contiguous"), (3,), (1, 7)) for case in cases("plain", vary=("norm",), shape=(3, N))},
    # One row's or sample's stride is its own where rows are apart. How many samples share a gradient is part of a kind.
    "modulated": (called(MODULATED), (2,), (5, 1)),
    "modulated, gapped": (called(MODULATED.but(layout="gapped")), (2, 1), (5, 3)),
    "modulated, backward": (called(MODULATED, "contiguous"), (2,), (2,)),
    "modulated, a sum": (called(MODULATED.but(without=("weight", "bias")), "contiguous"), (2,), (2,)),
    "gated": (called(GATED.but(norm="rms"), "contiguous"), (3,), (9, 1)),
    "gated groups": (called(GATED.but(group_size=16), "contiguous"), (3,), (9, 1)),
    "gated, gapped": (called(GATED.but(layout="gapped"), "contiguous"), (3, 1), (9, 2)),
    "group": (called(GROUP.but(activation="silu"), "contiguous"), (3,), (5, 1)),
    "group, channels last": (called(GROUP.but(layout="channels last"), "channels last"), (3,), (5, 2)),
}


@pytest.mark.parametrize(("call", "learnt", "others"), CALLS.values(), ids=CALLS)
def test_a_call_of_another_size_is_not_looked_at(
    call: Call, learnt: tuple[int, ...], others: tuple[int, ...], looked: list[str]
) -> None:
    """And returns what it does where nothing is known."""
    expected = {}
    for m in others:
        dispatch.forget()
        expected[m] = pieces(call(m))
    dispatch.forget()
    for m in learnt:
        call(m)
    looked.clear()
    for m in others:
        assert all(map(same_bits, pieces(call(m)), expected[m]))
    assert looked == []


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        *cases("plain", "modulated", "gated", vary=("norm",), shape=(2, 8, N), layout="transposed"),
        PLAIN.but(layout="transposed", without=("residual",)),
        PLAIN.but(layout="transposed", dropout_p=0.5, dropout_rng=(1, 2)),
    ],
    ids=str,
)
def test_kernels_for_rows_that_are_copied_are_chosen_once(case: Case, recorded: bool, looked: list[str]) -> None:
    given = operands(case)
    with torch.set_grad_enabled(recorded):
        for _ in range(2):
            looked.clear()
            outputs = case.run(given)
            if recorded:
                gradients(outputs, given, [LAYOUTS["transposed"](torch.ones_like(each)) for each in outputs])
    assert "kernel" not in looked
