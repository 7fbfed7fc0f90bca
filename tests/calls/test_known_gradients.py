"""Backward passes of modulated, gated and group norms: those like one before are launched without being looked at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import normforge
from proving.cases import LAYOUTS, Case, Tensors, agree, cases, doubled, formula, gradients, hold, operands

from ..calling import each_device

# Of each family, the cases whose backward pass is one that kernels compute, down to the last sum.
FAMILIES: dict[str, dict[str, Any]] = {
    "modulated": {"without": ("gate", "residual", "weight", "bias")},
    "gated": {},
    "group": {},
}
USUAL = [cases(family, **at)[0] for family, at in FAMILIES.items()]
each_usual = pytest.mark.parametrize("case", USUAL, ids=str)
MODULATED = USUAL[0]
WITH_A_SUM = [MODULATED.but(without=without) for without in (("gate", "weight", "bias"), ("weight", "bias"))]


def arriving_at(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return fixed numbers, in memory as the outputs lie."""
    return [torch.empty_like(each).copy_(torch.linspace(-1, 1, each.numel()).view(each.shape)) for each in outputs]


def passed(case: Case, given: Tensors, dy: torch.Tensor | None = None, *, holds: bool = False) -> Tensors:
    """Return the gradients of a call, of fixed numbers or of dy; if told, hold the call against the formula."""
    outputs = case.run(given)
    arriving: list[torch.Tensor | None] = [*arriving_at(outputs)]
    arriving[:1] = arriving[:1] if dy is None else [dy]
    found = gradients(outputs, given, arriving)
    if holds:
        hold(case, given, outputs, arriving, found)
    return found


held = partial(passed, holds=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        *cases("modulated", vary=("norm",), **FAMILIES["modulated"]),
        *WITH_A_SUM,
        *(
            case.but(layout=layout, group_size=size, shape=(2, 3, 40))
            for case in cases("gated", vary=("norm", "norm_before_gate"))
            for layout in ("contiguous", "gapped")
            for size in (None, 8)
        ),
        *(
            case.but(layout=layout)
            for case in cases("group", vary=("activation",))
            for layout in ("contiguous", "channels last")
        ),
    ],
    ids=str,
)
def test_the_second_backward_pass_is_known_on_a_card(case: Case, looked: list[str]) -> None:
    """As `test_other_sizes` asserts in the interpreter."""
    given = operands(case, "cuda")
    first = passed(case, given)
    looked.clear()
    second = held(case, given)
    assert all(torch.equal(gradient, first[name]) for name, gradient in second.items())
    if case.family == "group":
        assert [gradient.stride() for gradient in second.values()] == [leaf.stride() for leaf in given.values()]
    # Neither numbers nor addresses are known of a call.
    held(case, operands(case, "cuda", seed=1))
    # How many samples share a modulation is.
    for size in (70, 2) if case.family != "modulated" else ():
        held(case.but(shape=(size, *case["shape"][1:])), operands(case.but(shape=(size, *case["shape"][1:])), "cuda"))
    assert looked == []


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
        held(case.but(without=without), given, torch.randn_like(given["x"]))
    assert looked.count("gradients") == 2


@each_device
def test_under_batch_invariance_a_call_whose_tensors_are_copied_is_looked_at(device: str, looked: list[str]) -> None:
    given = operands(MODULATED, device)
    dy = LAYOUTS["offset"](torch.randn_like(given["x"]))
    with normforge.batch_invariant():
        found = [passed(MODULATED, given, each) for each in (dy, dy, dy.clone())]
    assert looked.count("gradients") == 3
    for name, gradient in found[0].items():
        assert all(torch.equal(gradient, other[name]) for other in found[1:]), name
