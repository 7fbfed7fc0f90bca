"""Random legal forward calls: every output within the bounds of the formats, and no bit touched beside them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ..thorough import LONG
from .profile import chooser, each_device, examples, problem_for


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
