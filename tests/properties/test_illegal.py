"""Random illegal calls: each a typed error before anything is written, and no harm to the calls after it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from normforge.errors import NormforgeError

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
