"""Contexts that are copied within `batch_invariant`, tasks say, and that outlive the block."""

from __future__ import annotations

import contextvars
from collections.abc import Callable

import pytest
import torch

import normforge
from normforge.selection import dispatch, invariance

from ..thorough import THOROUGH
from .shared import all_plans

WEIGHT = torch.randn(64, generator=torch.Generator().manual_seed(0))


pytestmark = pytest.mark.usefixtures("nothing_known")


def plain(x: torch.Tensor) -> None:
    normforge.layer_norm(x, (64,), WEIGHT)


def two_dimensional(x: torch.Tensor) -> None:
    normforge.rmsnorm2d_fwd(x, WEIGHT)


def grouped(x: torch.Tensor) -> None:
    normforge.group_norm(x, 4, WEIGHT)


def gated(x: torch.Tensor) -> None:
    normforge.gated_rms_norm(x, x, WEIGHT)


each_call = pytest.mark.parametrize("call", [plain, two_dimensional, grouped, gated])


def plans() -> list[bool]:
    """Whether the plans of the calls that this context knows are invariant."""
    return [getattr(plan, "plan", plan).is_invariant for plan in all_plans()]


def outliving(call: Callable[[torch.Tensor], None]) -> contextvars.Context:
    """A context that was copied within a block that was left."""
    with normforge.batch_invariant():
        return contextvars.copy_context()


@THOROUGH
@each_call
@pytest.mark.parametrize("first", ["within", "outside"])
def test_a_context_that_outlives_its_block_keeps_plans_of_its_own(
    call: Callable[[torch.Tensor], None], first: str
) -> None:
    x = torch.randn(8, 64)
    context = outliving(call)
    for _ in range(2):
        if first == "outside":
            call(x)
        assert context.run(invariance.is_on)
        context.run(call, x)
        assert set(context.run(plans)) == {True}
        assert not invariance.is_on()
        call(x)
        assert set(plans()) == {False}


def test_contexts_that_are_gone_cost_nothing() -> None:
    context = outliving(plain)
    assert "plans" not in vars(dispatch)
    del context
    with normforge.batch_invariant():
        pass
    assert "plans" in vars(dispatch)
