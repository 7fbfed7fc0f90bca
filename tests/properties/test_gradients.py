"""Random legal training steps and calls of the backward functions: every gradient within the bounds of the formats."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from ..thorough import THOROUGH
from . import oracle
from .gradient_problems import draw_backward, draw_step
from .problems import MOST_ELEMENTS
from .profile import chooser, each_device, examples, kind_for, profile_of


@THOROUGH
@each_device
@examples(70)
@given(data=st.data())
def test_a_training_step_has_the_gradients_of_its_formula_and_touches_no_operand(
    device: str, data: st.DataObject
) -> None:
    choose = chooser(data)
    kind = kind_for(choose, device, "steps")
    step = draw_step(choose, kind, profile_of(device).shapes_of(math.prod(kind.normalized)), MOST_ELEMENTS)
    made = step.made(torch.device(device))
    outputs = made.forward()
    made.check(outputs, made.backward(outputs))


@THOROUGH
@each_device
@examples(60)
@given(data=st.data())
def test_a_backward_call_has_the_gradients_of_its_formula_and_touches_no_operand(
    device: str, data: st.DataObject
) -> None:
    choose = chooser(data)
    kind = kind_for(choose, device, "backward")
    call = draw_backward(choose, kind, profile_of(device).shapes_of(kind.n), MOST_ELEMENTS)
    call.run(torch.device(device))


@THOROUGH
@each_device
@examples(20)
@given(data=st.data())
def test_two_steps_at_once_keep_what_each_needs_for_its_own_gradients(device: str, data: st.DataObject) -> None:
    """Forward, forward, backward, backward, of one kind."""
    choose = chooser(data)
    kind = kind_for(choose, device, "steps")
    steps = [draw_step(choose, kind, profile_of(device).shapes, MOST_ELEMENTS) for _ in range(2)]
    made = [step.made(torch.device(device)) for step in steps]
    outputs = [one.forward() for one in made]
    for one, output in zip(made, outputs, strict=True):
        one.check(output, one.backward(output))


def test_the_oracle_is_what_torch_differentiates_in_fp64() -> None:
    """The formulas for gradients, against autograd through the formula for y; nothing of normforge runs."""
    torch.manual_seed(0)
    for centres in (True, False):
        x, residual, dy, dresidual = (torch.randn(5, 9, dtype=torch.float64) for _ in range(4))
        weight, bias, x_bias = (torch.randn(9, dtype=torch.float64) for _ in range(3))
        leaves = [tensor.requires_grad_() for tensor in (x, weight, bias, x_bias)]
        s = x + x_bias + residual
        centred = s - s.mean(-1, keepdim=True) if centres else s
        y = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (weight + 0.5) + bias
        want = torch.autograd.grad([y, s], leaves, [dy, dresidual])
        with torch.no_grad():
            rows = oracle.statistics(s, centres, 1e-5)
            value, factor = oracle.affine(rows.h, weight, bias, 0.5)
            torch.testing.assert_close(value.value, y)
            found = oracle.gradients(rows, dy, factor, dresidual, centres)
            for got, expected in zip(found, want, strict=True):
                torch.testing.assert_close(got.value, expected)
