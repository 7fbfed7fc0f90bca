"""Random legal training steps and calls of the backward functions: every gradient within the bounds of the formats."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ..thorough import THOROUGH
from .profile import chooser, each_device, examples, kind_for, problem_for


@THOROUGH
@each_device
@pytest.mark.parametrize("what", ["steps", "backward"])
@examples(65)
@given(data=st.data())
def test_gradients_are_those_of_the_formula_and_no_operand_is_touched(
    what: str, device: str, data: st.DataObject
) -> None:
    made = problem_for(chooser(data), device, what).made(torch.device(device))
    made.check(made.run())


@THOROUGH
@each_device
@examples(20)
@given(data=st.data())
def test_two_steps_at_once_keep_what_each_needs_for_its_own_gradients(device: str, data: st.DataObject) -> None:
    """Forward, forward, backward, backward, of one kind."""
    choose = chooser(data)
    kind = kind_for(choose, device, "steps")
    made = [problem_for(choose, device, "steps", kind).made(torch.device(device)) for _ in range(2)]
    outputs = [one.forward() for one in made]
    for one, output in zip(made, outputs, strict=True):
        one.check((output, one.backward(output)))
