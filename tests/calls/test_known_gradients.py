"""Backward passes of modulated, gated and group norms: those like one before are launched without being looked at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import normforge
from proving.cases import LAYOUTS, Case, Tensors, agree, cases, check, doubled, formula, gradients, operands

from ..calling import each_device

MODULATED = cases("modulated", without=("gate", "residual", "weight", "bias"))[0]
WITH_A_SUM = [MODULATED.but(without=without) for without in (("gate", "weight", "bias"), ("weight", "bias"))]


def arriving_at(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return fixed numbers, in memory as the outputs lie."""
    return [torch.empty_like(each).copy_(torch.linspace(-1, 1, each.numel()).view(each.shape)) for each in outputs]


@each_device
@pytest.mark.parametrize("case", WITH_A_SUM, ids=str)
@pytest.mark.parametrize("first", ["y alone", "both"])
def test_a_sum_that_is_read_or_not(first: str, case: Case, device: str, looked: list[str]) -> None:
    """Of a model's blocks the last one's sum is read by nobody, and its backward pass runs before all others'."""

    def of(run: Callable[[Tensors], tuple[torch.Tensor, ...]], given: Tensors, outputs: int) -> Tensors:
        made = run(given)[:outputs]
        return gradients(made, given, arriving_at(made))

    ways = (1, 2) if first == "y alone" else (2, 1)
    for outputs in ways:
        given = operands(case, device)
        looked.clear()
        found = of(case.run, given, outputs)
        assert "gradients" in looked
        agree(given, found, of(lambda wide: formula(case, wide), doubled(given), outputs))
    looked.clear()
    for outputs in ways:
        of(case.run, operands(case, device), outputs)
    assert looked == []


@each_device
@pytest.mark.parametrize("absent", [("weight",), ("bias",), ("weight", "bias")], ids=str)
def test_vectors_that_were_not_there_are_read(absent: tuple[str, ...], device: str, looked: list[str]) -> None:
    """Of x alone a gradient is due, so that it says nothing of them."""
    (case,) = cases("group", vary=(), activation="silu")
    for without in (absent, (), absent):
        given = operands(case.but(without=without), device)
        for name, tensor in given.items():
            tensor.requires_grad_(name == "x")
        check(case.but(without=without), given, [torch.randn_like(given["x"])])
    assert looked.count("gradients") == 2


@each_device
def test_under_batch_invariance_a_call_whose_tensors_are_copied_is_looked_at(device: str, looked: list[str]) -> None:
    given = operands(MODULATED, device)
    dy = LAYOUTS["offset"](torch.randn_like(given["x"]))
    with normforge.batch_invariant():
        found = [gradients(MODULATED.run(given), given, [each]) for each in (dy, dy, dy.clone())]
    assert looked.count("gradients") == 3
    for name, gradient in found[0].items():
        assert all(torch.equal(gradient, other[name]) for other in found[1:]), name
