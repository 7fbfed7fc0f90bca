"""Random calls: outputs and gradients within the bounds of the formats, and a typed error of what is illegal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from normforge.errors import NormforgeError

from ..thorough import LONG, THOROUGH
from .illegal import spoilt
from .profile import chooser, each_device, examples, kind_for, problem_for


@LONG
@each_device
@examples(140)
@given(data=st.data())
def test_a_legal_call_computes_what_it_says_and_touches_nothing_else(device: str, data: st.DataObject) -> None:
    made = problem_for(chooser(data), device).made(torch.device(device))
    made.check(made.run())


@each_device
@examples(40)
@given(data=st.data())
def test_two_norms_compute_what_they_say_and_touch_nothing_else(device: str, data: st.DataObject) -> None:
    made = problem_for(chooser(data), device, "renormed").made(torch.device(device))
    made.check(made.run())


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


@each_device
@examples(250)
@given(data=st.data())
def test_an_illegal_call_is_a_typed_error_and_writes_nothing(device: str, data: st.DataObject) -> None:
    choose = chooser(data)
    made = problem_for(choose, device).made(torch.device(device))
    wrong = spoilt(choose, made)
    assume(wrong is not None)
    assert wrong is not None
    with pytest.raises(NormforgeError):
        made.function(**wrong)
    made.check_untouched(refused=True)
