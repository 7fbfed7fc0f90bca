"""Random legal training steps and calls of the backward functions: every gradient within the bounds of the formats."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ..thorough import THOROUGH
from . import oracle
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
