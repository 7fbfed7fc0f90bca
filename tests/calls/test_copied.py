"""Calls of tensors that are copied first: the copies are of a kind that is known from the second call on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import normforge
from normforge.calls import first, row_gradients
from normforge.calls.plan import Plan, plan_of
from normforge.selection import dispatch

from ..counting import counted

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
    "gated_rms_norm": lambda x: normforge.gated_rms_norm(x, rows(), VECTOR),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("recorded", [True, False])
def test_rows_that_are_copied_are_planned_once(
    recorded: bool, call: Callable[[torch.Tensor], Any], planned: list[str]
) -> None:
    with torch.set_grad_enabled(recorded):
        for _ in range(2):
            planned.clear()
            call(torch.randn(N, 8, 2).transpose(0, -1).requires_grad_())
    assert planned == []
