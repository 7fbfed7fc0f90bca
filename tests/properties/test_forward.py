"""Random legal forward calls: every output within the bounds of the formats, and no bit touched beside them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ..thorough import LONG, THOROUGH
from .profile import chooser, each_device, examples, problem_for


def _bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().reshape(-1).view(torch.uint8)


@LONG
@each_device
@examples(100)
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
@examples(35)
@given(data=st.data())
def test_a_second_call_of_a_kind_answers_for_its_own_tensors_and_leaves_the_first_alone(
    device: str, data: st.DataObject
) -> None:
    first = problem_for(chooser(data), device)
    second = problem_for(chooser(data), device, kind=first.kind)
    of_first, of_second = first.made(torch.device(device)), second.made(torch.device(device))
    output = of_first.run()
    of_second.check(of_second.run())
    of_first.check(output)


@THOROUGH
@each_device
@examples(40)
@given(data=st.data())
def test_rows_with_nan_and_infinity_reach_no_other_row(device: str, data: st.DataObject) -> None:
    clean = problem_for(chooser(data), device)
    made = replace(clean, poisoned=True).made(torch.device(device))
    output = made.run()
    made.check(output)
    m = math.prod(clean.leading)
    if m == 0:
        return
    without = clean.made(torch.device(device)).run()
    for name, got, want in zip(output._fields, output, without, strict=True):
        if got is not None and want is not None:
            same = torch.equal(_bits(got.reshape(m, -1)[::2]), _bits(want.reshape(m, -1)[::2]))
            assert same, f"{name}: rows beside those with a NaN or an infinity changed, in {made.call}"


@THOROUGH
@each_device
@examples(40)
@given(data=st.data())
def test_a_scale_by_a_power_of_two_is_exact(device: str, data: st.DataObject) -> None:
    """y(c s, c^2 eps) is y(s, eps) to the bit, and rstd a cth: fp32 scales by a power of two without rounding."""
    call = problem_for(chooser(data), device)
    # A stored fp16 sum below 2**-14 is rounded to a multiple of 2**-24, whatever it was scaled by.
    residual = call.kind.residual
    assume(call.kind.fadd != "pre_add_store" or residual is None or residual.dtype is not torch.float16)
    scale = chooser(data)((2.0, 4.0))
    larger = replace(call, scale=scale, eps=call.eps * scale**2)
    outputs, of_larger = (one.made(torch.device(device)).run() for one in (call, larger))
    for name, got, want in (
        ("y", of_larger.y, outputs.y),
        ("y_scale", of_larger.y_scale, outputs.y_scale),
        ("mean", of_larger.mean, None if outputs.mean is None else outputs.mean * scale),
        ("rstd", of_larger.rstd, None if outputs.rstd is None else outputs.rstd / scale),
    ):
        if got is not None and want is not None:
            assert torch.equal(_bits(got), _bits(want)), f"{name} changes with the scale of {larger}"


@THOROUGH
@each_device
@examples(40)
@given(data=st.data())
def test_a_shift_of_x_leaves_layernorm_as_it_is(device: str, data: st.DataObject) -> None:
    """Sums with c are exact here, so that what is expected of both is made from the values without it."""
    call = problem_for(chooser(data), device)
    for shift in (0.0, 8.0):
        made = replace(call, shift=shift).made(torch.device(device))
        made.check(made.run())
