"""Cells of gated norms: their tensors, what they move, and the oracle, which refuses what is not gated right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from benchmarks.cells import Norm, Task, at_most
from benchmarks.gated_cells import GatedCell
from benchmarks.gates import composed
from benchmarks.inputs import make_inputs
from benchmarks.oracle import WrongOutputError, check, expect
from benchmarks.suites import gated

CELLS = at_most(gated.SUITE.cells, rows=8)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_this_project_computes_what_the_oracle_says(cell: GatedCell) -> None:
    inputs = make_inputs(cell, torch.device("cpu"))
    function: Any = normforge.gated_layer_norm if cell.norm is Norm.LAYER else normforge.gated_rms_norm
    leaves = inputs.leaves()
    options = {"norm_before_gate": not cell.gate_first, "group_size": cell.columns or None, "eps": inputs.eps}
    y = function(*leaves, **options)
    outputs = {"y": y}
    if inputs.dy is not None:
        names = ("dx", "dgate", "dweight", "dbias")
        outputs = dict(zip(names, torch.autograd.grad(y, leaves, inputs.dy), strict=False))
    wanted = expect(inputs)
    assert wanted.keys() == outputs.keys()
    check(outputs, wanted, inputs)


def test_another_order_is_refused() -> None:
    inputs = make_inputs(CELLS[0], torch.device("cpu"))
    cell = GatedCell(Task.GATED, Norm.RMS, 8, 64, gate_first=True)
    swapped = composed(cell, inputs.eps)
    with pytest.raises(WrongOutputError, match="y is wrong"):
        check({"y": swapped(*inputs.operands())}, expect(inputs), inputs)


def test_halves_of_a_projection_are_no_copies() -> None:
    cell = GatedCell(Task.GATED, Norm.RMS, 8, 64, projected=True)
    inputs = make_inputs(cell, torch.device("cpu"))
    assert inputs.gate is not None
    assert inputs.x.stride() == inputs.gate.stride() == (128, 1)
    assert inputs.gate.data_ptr() - inputs.x.data_ptr() == 64 * 2


def test_what_moves_is_x_the_gate_and_what_comes_out() -> None:
    assert GatedCell(Task.GATED, Norm.RMS, 8, 64).bytes_moved == 3 * 8 * 64 * 2
    assert GatedCell(Task.GATED_BACKWARD, Norm.RMS, 8, 64).bytes_moved == 5 * 8 * 64 * 2
