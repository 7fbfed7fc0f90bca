"""Backward passes of rows in parts, what adds up their sums and in which type; known ones are not looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import profiler

import normforge
from normforge.calls.plan import Plan
from normforge.kernels.pipelines import programs_a_part
from proving.cases import LAYOUTS, Case, Tensors, agree, cases, check, doubled, formula, gradients, operands

from ..calling import all_plans, each_device

pytestmark = pytest.mark.usefixtures("nothing_known")


N = 48


@pytest.mark.parametrize(
    ("most", "parts", "tiles", "expected"),
    [
        # One part takes what runs at once, but for those without which each takes no more, or as many as it has tiles.
        (528, 1, 528 * 62, 528),
        (528, 1, 32768, 521),
        (528, 1, 100, 100),
        # 17 for each of 32 would be 544.
        (528, 32, 1024, 16),
        (264, 32, 1024, 8),
        (264, 132, 1000, 2),
        # One wave of half the GPU takes 1000 tiles in turn, four that fill it 143 each.
        (264, 133, 1000, 7),
        (132, 4096, 8, 1),
        # A part of 9 tiles in 8 programs is no faster than in 5.
        (264, 32, 9, 5),
    ],
)
def test_programs_fill_whole_waves(most: int, parts: int, tiles: int, expected: int) -> None:
    assert programs_a_part(most, parts, tiles) == expected


@given(most=st.integers(1, 2112), parts=st.integers(1, 300), tiles=st.integers(1, 5000))
def test_programs_are_of_few_waves_and_a_part_waits_for_no_other(most: int, parts: int, tiles: int) -> None:
    each = programs_a_part(most, parts, tiles)
    assert 1 <= each <= tiles
    assert each == 1 or parts * each <= 4 * most
    waves = -(-parts * each // most)
    # Those of fewer waves would take longer.
    fewer = [other for other in range(1, each) if parts * other <= (waves - 1) * most]
    assert not any(-(-tiles // other) * -(-parts * other // most) < waves * -(-tiles // each) for other in fewer)


def modulated(device: str, dtype: torch.dtype, **affine: Any) -> list[Any]:
    leaves = [torch.randn(size, device=device).to(dtype).requires_grad_() for size in ((3, 9, N), (3, N), (3, N))]
    y = normforge.modulated_layer_norm(*leaves, **affine)
    return [y, leaves, torch.randn_like(y)]


def backward_plans() -> list[Plan]:
    """The plans that hold kernels of backward passes."""
    return [plan for plan in all_plans() if isinstance(plan, Plan) and plan.mode.is_backward]


def names_of(call: Any) -> set[str]:
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages()}


@each_device
def test_one_kernel_makes_gradients_of_what_programs_leave(device: str) -> None:
    """By torch's operators that was two sums and two casts, each a launch: 75 of 241 us, of 32768 rows of 3072."""
    y, leaves, dy = modulated(device, torch.bfloat16)
    found = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    assert [gradient.dtype for gradient in found] == [torch.bfloat16] * 3
    (plan,) = backward_plans()
    ready = plan.prepared(27)
    assert ready.assembly.finisher is not None
    types = dict(ready.launchers[-1].key.arguments)
    assert str(types["dweight_ptr"]).startswith("*bf16")
    assert str(types["dweight_partials_ptr"]).startswith("*fp32")
    assert "aten::sum" not in names_of(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True))


@each_device
def test_misaligned_gradients_take_a_kernel_of_their_own_after_aligned_ones(device: str) -> None:
    y, leaves, dy = modulated(device, torch.float32)
    misaligned = torch.zeros(dy.numel() + 1, device=device)[1:].view(dy.shape)
    for arriving in (dy, misaligned):
        torch.autograd.grad(y, leaves, arriving, retain_graph=True)
    plans = backward_plans()
    types = [str(dict(plan.prepared(27).launchers[0].key.arguments)["dy_ptr"]) for plan in plans]
    assert types == ["*fp32:16", "*fp32"]


@each_device
def test_what_samples_share_with_others_is_added_up_in_fp32(device: str) -> None:
    """Dscale is made of both sums and the bias, so that neither is rounded before."""
    bias = torch.randn(N, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(N, device=device, dtype=torch.bfloat16, requires_grad=True)
    y, leaves, dy = modulated(device, torch.bfloat16, weight=weight, bias=bias)
    torch.autograd.grad(y, [*leaves, weight, bias], dy)
    (plan,) = backward_plans()
    assert plan.sum_dtypes == (torch.float32, torch.float32, None)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_samples_are_each_rounded_once(dtype: torch.dtype, device: str) -> None:
    y, leaves, dy = modulated(device, dtype)
    found = torch.autograd.grad(y, leaves, dy)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    h = torch.nn.functional.layer_norm(wide[0], (N,))
    exact = torch.autograd.grad(h * (1 + wide[1].unsqueeze(1)) + wide[2].unsqueeze(1), wide, dy.double())
    step = torch.finfo(dtype).eps
    for got, wanted in zip(found, exact, strict=True):
        floor = 1e-6 * float(wanted.abs().max())
        torch.testing.assert_close(got.double(), wanted, rtol=0.51 * step + 1e-6, atol=floor)


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
