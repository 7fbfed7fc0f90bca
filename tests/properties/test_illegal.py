"""Random illegal calls: each a typed error before anything is written, and no harm to the calls after it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from normforge.errors import NormforgeError

from ..thorough import THOROUGH
from .illegal import spoilt
from .profile import chooser, each_device, examples, problem_for


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


@THOROUGH
@each_device
@examples(25)
@given(data=st.data())
def test_an_illegal_call_like_one_known_is_an_error_too_and_leaves_the_known_one_known(
    device: str, data: st.DataObject
) -> None:
    choose = chooser(data)
    call = problem_for(choose, device)
    for _ in range(2):
        legal, other = call.made(torch.device(device)), call.made(torch.device(device))
        legal.check(legal.run())
        wrong = spoilt(choose, other)
        if wrong is not None:
            with pytest.raises(NormforgeError):
                other.function(**wrong)
            other.check_untouched(refused=True)
