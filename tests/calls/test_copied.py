"""Calls of tensors that are copied first: the copies are of a kind that is known from the second call on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import normforge
from normforge.calls import first, row_gradients
from normforge.calls.plan import Plan, plan_of
from normforge.selection import dispatch

from ..counting import counted
from .shared import there

N = 32
VECTOR = torch.randn(N).requires_grad_()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of what plans calls, whenever one was planned."""
    dispatch.forget()
    names: list[str] = []
    monkeypatch.setattr(first, "Plan", counted(names, "plain", Plan))
    monkeypatch.setattr(row_gradients, "plan_of", counted(names, "in parts", plan_of))
    yield names
    dispatch.forget()


def rows() -> torch.Tensor:
    return torch.randn(2, 8, N).requires_grad_()


def modulation() -> torch.Tensor:
    return torch.randn(2, N).requires_grad_()


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "layer_norm": lambda x: normforge.layer_norm(x, (N,), VECTOR, VECTOR),
    "rms_norm": lambda x: normforge.rms_norm(x, (N,), VECTOR),
    "add_layer_norm": lambda x: normforge.add_layer_norm(x, rows(), VECTOR, VECTOR),
    "dropout": lambda x: normforge.add_rms_norm(x, rows(), VECTOR, dropout_p=0.5, dropout_rng=(1, 2)),
    "modulated_layer_norm": lambda x: normforge.modulated_layer_norm(x, modulation(), modulation()),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


def lying(gradient: torch.Tensor, how: str) -> torch.Tensor:
    """A gradient of ones, which lies in memory otherwise than rows of a tensor that is new."""
    if how == "expanded":
        return torch.ones(()).expand(gradient.shape)
    if how == "negated":
        return torch._neg_view(-gradient)
    return gradient.transpose(0, -1).contiguous().transpose(0, -1)


@each_call
@pytest.mark.parametrize("how", ["expanded", "negated", "transposed"])
def test_a_gradient_that_does_not_lie_as_the_last_one_is_planned_once(
    call: Callable[[torch.Tensor], Any], how: str, planned: list[str]
) -> None:
    found: list[torch.Tensor] = []
    for _ in range(3):
        planned.clear()
        x = torch.arange(2.0 * 8 * N).view(2, 8, N).sin().requires_grad_()
        made = call(x)
        y = made[0] if isinstance(made, tuple) else made
        y.backward(lying(torch.ones_like(y), how))
        found.append(there(x.grad))
    # Gradients of a negated modulated norm are torch's own.
    assert planned == []


@pytest.mark.parametrize("name", [*CALLS, "gated_rms_norm"])
def test_rows_that_are_copied_are_planned_once(name: str, planned: list[str]) -> None:
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        **CALLS,
        "gated_rms_norm": lambda x: normforge.gated_rms_norm(x, rows(), VECTOR),
    }
    want = None
    for recorded in (True, False):
        for _ in range(2):
            planned.clear()
            x = torch.arange(2.0 * 8 * N).view(N, 8, 2).sin().transpose(0, -1).requires_grad_()
            with torch.set_grad_enabled(recorded):
                made = calls[name](x)
            if name in ("layer_norm", "rms_norm"):
                want = made.detach() if want is None else want
                assert torch.equal(made.detach(), want)
        assert planned == []


def misaligned(*shape: int) -> torch.Tensor:
    """Return a tensor of ones whose address is not a multiple of 16 bytes."""
    return torch.ones(math.prod(shape) + 1)[1:].view(shape)


PER_ROW = torch.ones(4)
# Operators whose kernels do not read every tensor in vectors: x_scale, dropout_rng and quantisation's scales.
MISALIGNED_CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "layernorm2d_fwd": lambda x, weight: normforge.layernorm2d_fwd(x, weight),
    "layernorm2d_bwd": lambda x, weight: normforge.layernorm2d_bwd(x, x, weight, mean=PER_ROW, rstd=PER_ROW),
    "rmsnorm2d_bwd": lambda x, weight: normforge.rmsnorm2d_bwd(x, x, weight, rstd=PER_ROW),
    "rms_norm": lambda x, weight: torch.autograd.grad(
        normforge.rms_norm(x, (N,), weight.requires_grad_()), [weight], x
    ),
    "layer_norm": lambda x, weight: torch.autograd.grad(
        normforge.layer_norm(x.requires_grad_(), (N,), weight), [x], torch.ones_like(x) + x.detach()
    ),
    "gated_rms_norm": lambda x, weight: normforge.gated_rms_norm(x, x, weight),
    "modulated_layer_norm": lambda x, weight: normforge.modulated_layer_norm(x, x, x, weight=weight),
    "quantised_rms_norm": lambda x, weight: normforge.quantised_rms_norm(x, weight),
    "quantised_rms_norm, static": lambda x, weight: normforge.quantised_rms_norm(
        x, weight, fquant="static", y_scale=PER_ROW[:1]
    ),
}


def of_misaligned(name: str, which: str) -> None:
    x = misaligned(4, N) if which != "weight" else torch.ones(4, N)
    MISALIGNED_CALLS[name](x, misaligned(N) if which != "x" else torch.ones(N))


def of_a_misaligned_scale() -> None:
    normforge.quantised_rms_norm(torch.ones(4, N), fquant="static", y_scale=misaligned(1))


def of_an_operator() -> None:
    """The dispatcher passes `wants` as a list."""
    x = torch.ones(4, N)
    torch.ops.normforge.rmsnorm2d_bwd(
        x, x, None, PER_ROW, 0.0, None, None, 0.0, None, "after_weight", None, None, ["dx"]
    )


PLANNED_ONCE: dict[str, Callable[[], None]] = {
    f"{name}-{which}": partial(of_misaligned, name, which)
    for name in MISALIGNED_CALLS
    for which in ("x", "weight", "both")
} | {"a scale": of_a_misaligned_scale, "a backward operator": of_an_operator}


@pytest.mark.parametrize("call", PLANNED_ONCE.values(), ids=PLANNED_ONCE)
def test_tensors_anywhere_are_planned_once(call: Callable[[], None], planned: list[str]) -> None:
    for _ in range(2):
        planned.clear()
        call()
    assert planned == []
