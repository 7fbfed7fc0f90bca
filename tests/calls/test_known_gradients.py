"""Backward passes of modulated, gated and group norms: those like one before are launched without being looked at."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge
from proving.cases import (
    LAYOUTS,
    Case,
    Tensors,
    agree,
    cases,
    close,
    coarser,
    doubled,
    exact,
    formula,
    gradients,
    operands,
)

from ..calling import each_device
from ..thorough import THOROUGH
from .looked import Looked

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


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    return Looked(monkeypatch)


def arriving_at(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return fixed numbers, in memory as the outputs lie."""
    there = [each for each in outputs if each.requires_grad]
    return [torch.empty_like(each).copy_(torch.linspace(-1, 1, each.numel()).view(each.shape)) for each in there]


def passed(case: Case, given: Tensors, dy: torch.Tensor | None = None) -> Tensors:
    """Return the gradients of a call, of fixed numbers or of dy."""
    outputs = case.run(given)
    arriving = arriving_at(outputs)
    arriving[:1] = arriving[:1] if dy is None else [dy]
    return gradients([each for each in outputs if each.requires_grad], given, arriving)


def held(case: Case, given: Tensors, dy: torch.Tensor | None = None) -> Tensors:
    """Return the gradients of a call, which must be fp64 autograd's."""
    found = passed(case, given, dy)
    with torch.no_grad():
        types = given["x"].dtype, given.get("residual", given["x"]).dtype
        wanted = formula(case, given)
        arriving = arriving_at(
            tuple([each.to(dtype).requires_grad_() for each, dtype in zip(wanted, types, strict=False)])
        )
    arriving[:1] = arriving[:1] if dy is None else [dy]
    agree(given, found, exact(case, given, arriving), coarser(given["x"].dtype, arriving[-1].dtype))
    return found


@each_device
@pytest.mark.parametrize(
    "case",
    [
        *cases("modulated", vary=("norm",), **FAMILIES["modulated"]),
        *(case.but(norm=norm) for case in WITH_A_SUM for norm in ("layer", "rms")),
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
def test_the_second_backward_pass_is_known(case: Case, device: str, looked: Looked) -> None:
    given = operands(case, device)
    first = passed(case, given)
    assert looked.counts() == (1, 0)
    second = held(case, given)
    assert looked.counts() == (0, 1)
    assert all(torch.equal(gradient, first[name]) for name, gradient in second.items())
    if case.family == "group":
        assert [gradient.stride() for gradient in second.values()] == [leaf.stride() for leaf in given.values()]
    # Neither numbers nor addresses are known of a call.
    held(case, operands(case, device, seed=1))
    assert looked.counts() == (0, 1)


@each_device
@pytest.mark.parametrize("case", [*USUAL[1:], USUAL[1].but(layout="gapped"), USUAL[1].but(group_size=8)], ids=str)
def test_another_first_dimension_is_known(case: Case, device: str, looked: Looked) -> None:
    passed(case, operands(case, device))
    looked.counts()
    # One row's stride is its own where rows are apart; a sample of GroupNorm has many groups, and each a program.
    many = 20 if case.family == "group" else 70
    for size in (many, 2) if case["layout"] == "gapped" else (many, 2, 1):
        other = case.but(shape=(size, *case["shape"][1:]))
        held(other, operands(other, device))
        assert looked.counts() == (0, 1), size


@each_device
@each_usual
def test_no_rows_are_no_kernels(case: Case, device: str) -> None:
    passed(case, operands(case, device))
    none = case.but(shape=(0, *case["shape"][1:]))
    found = passed(none, operands(none, device))
    assert found["x"].shape == none["shape"]
    assert not any(gradient.any() for gradient in found.values())


@THOROUGH
@each_device
@pytest.mark.parametrize("case", [WITH_A_SUM[1], *USUAL[1:]], ids=str)
def test_what_differs_on_any_axis_is_looked_at(case: Case, device: str, looked: Looked) -> None:
    """Each axis of the table is part of the key that a pass is known by."""
    passed(case, operands(case, device))
    shape = case["shape"]
    others = [*cases(case.family, without=case["without"], shape=shape)][1:]
    others += [case.but(shape=(shape[0], shape[1] + 4, *shape[2:]))]
    others += [case.but(shape=(1, math.prod(shape[:-1]), shape[-1]))] if case.family != "group" else []
    # Of GroupNorm rows with gaps are copied, and then like the first.
    for other in [each for each in others if (each.family, each["layout"]) != ("group", "gapped")]:
        looked.counts()
        held(other, operands(other, device))
        assert looked.counts()[1] == 0, other


@each_device
@each_usual
def test_gradients_that_lie_otherwise_are_copied_and_then_known(case: Case, device: str, looked: Looked) -> None:
    given = operands(case, device)
    passed(case, given)
    counts = {}
    for layout in ("transposed", "expanded", "gapped", "negated", "offset", "again"):
        looked.counts()
        held(case, given, LAYOUTS["offset" if layout == "again" else layout](torch.randn_like(given["x"])))
        counts[layout] = looked.counts()
    copied = dict.fromkeys(counts, (1, 1))
    if case.family == "group":
        assert counts == {**copied, "offset": (1, 0), "again": (0, 1)}
    else:
        # A negated gradient is left to torch's operators.
        assert counts == {**copied, "gapped": (1, 0), "negated": (0, 0), "offset": (1, 0), "again": (0, 1)}


@THOROUGH
@each_device
@pytest.mark.parametrize("case", [*USUAL, WITH_A_SUM[1]], ids=str)
def test_only_what_is_due_is_made(case: Case, device: str, looked: Looked) -> None:
    """Passes are known by which gradients are due, too."""
    given = operands(case, device)
    everything = passed(case, given)
    names = [*given]
    for due in (*((name,) for name in names), *zip(names[1:], names, strict=False)):
        looked.counts()
        for name, tensor in given.items():
            tensor.requires_grad_(name in due)
        for _ in range(2):
            for name, gradient in passed(case, given).items():
                close(name, gradient, everything[name].double(), 1e-5)
        assert looked.counts() == (1, 1), due


@each_device
@each_usual
def test_a_second_derivative_is_not_known(case: Case, device: str, looked: Looked) -> None:
    """What a gradient is asked of keeps being torch's operators."""
    given = operands(case, device)
    passed(case, given)
    looked.counts()
    (dx,) = torch.autograd.grad(case.run(given)[0].square().sum(), given["x"], create_graph=True)
    assert dx.requires_grad
    assert looked.counts() == (0, 0)


@each_device
@pytest.mark.parametrize("case", WITH_A_SUM, ids=str)
@pytest.mark.parametrize("first", ["y alone", "both"])
def test_a_sum_that_is_read_or_not(first: str, case: Case, device: str, looked: Looked) -> None:
    """Of a model's blocks the last one's sum is read by nobody, and its backward pass runs before all others'."""

    def of(run: Callable[[Tensors], tuple[torch.Tensor, ...]], given: Tensors, outputs: int) -> Tensors:
        made = run(given)[:outputs]
        return gradients(made, given, arriving_at(made))

    ways = (1, 2) if first == "y alone" else (2, 1)
    for outputs in ways:
        given = operands(case, device)
        found = of(case.run, given, outputs)
        assert looked.counts() == (1, 0)
        agree(given, found, of(lambda wide: formula(case, wide), doubled(given), outputs))
    for outputs in ways:
        of(case.run, operands(case, device), outputs)
    assert looked.counts() == (0, 2)


@each_device
def test_what_kernels_leave_sums_for_is_looked_at_each_time(device: str, looked: Looked) -> None:
    """With a weight, with a scale for all samples, or with a weight that groups share, torch adds sums up."""
    weighted = MODULATED.but(without=("gate", "residual"))
    for case in (weighted, MODULATED.but(sharing=("all", "sample", "sample"))):
        found = [held(case, operands(case, device)) for _ in range(2)]
        assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())
        assert looked.counts() == (2, 0)
    function: Any = normforge.gated_layer_norm
    leaves = [torch.randn(size, device=device, requires_grad=True) for size in ((6, 3, 16), (6, 3, 16), (3, 16), (16,))]
    both = [torch.autograd.grad(function(*leaves).sum(), leaves) for _ in range(2)]
    assert looked.counts() == (2, 0)
    assert [gradient.shape for gradient in both[0]] == [leaf.shape for leaf in leaves]
    assert all(map(torch.equal, *both))


@each_device
@pytest.mark.parametrize("absent", [("weight",), ("bias",), ("weight", "bias")], ids=str)
def test_vectors_that_were_not_there_are_read(absent: tuple[str, ...], device: str, looked: Looked) -> None:
    """Of x alone a gradient is due, so that it says nothing of them."""
    (case,) = cases("group", vary=(), activation="silu")
    for without in (absent, (), absent):
        given = operands(case.but(without=without), device)
        for name, tensor in given.items():
            tensor.requires_grad_(name == "x")
        held(case.but(without=without), given, torch.randn_like(given["x"]))
    assert looked.counts() == (2, 1)


@each_device
def test_under_batch_invariance_a_call_whose_tensors_are_copied_is_looked_at(device: str, looked: Looked) -> None:
    given = operands(MODULATED, device)
    dy = LAYOUTS["offset"](torch.randn_like(given["x"]))
    with normforge.batch_invariant():
        found = [passed(MODULATED, given, each) for each in (dy, dy, dy.clone())]
    assert looked.counts() == (3, 0)
    for name, gradient in found[0].items():
        assert all(torch.equal(gradient, other[name]) for other in found[1:]), name
