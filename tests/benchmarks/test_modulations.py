"""Cells of modulated norms: their tensors, what they move, and the oracle, which refuses another modulation."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from benchmarks.cells import Norm, Task, at_most
from benchmarks.inputs import make_inputs
from benchmarks.modulated_cells import ModulatedCell
from benchmarks.modulations import composed
from benchmarks.oracle import WrongOutputError, check, expect
from benchmarks.providers.normforge import PROVIDERS
from benchmarks.suites import modulated

CELLS = [
    ModulatedCell(task, norm, 16, 64, samples=2, gated=gated)
    for task, norm, gated in product((Task.MODULATED, Task.MODULATED_BACKWARD), Norm, (False, True))
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_this_project_computes_what_the_oracle_says(cell: ModulatedCell) -> None:
    inputs = make_inputs(cell, torch.device("cpu"))
    builder = PROVIDERS[0].builder(cell)
    assert builder is not None
    prepared = builder(inputs)
    outputs, wanted = prepared.outputs(prepared.call()), expect(inputs)
    assert wanted.keys() == outputs.keys()
    check(outputs, wanted, inputs)


@pytest.mark.parametrize("place", [0, 1], ids=["scale", "shift"])
def test_another_modulation_is_refused(place: int) -> None:
    inputs = make_inputs(CELLS[0], torch.device("cpu"))
    given = list(inputs.modulation)
    given[place] = given[place] * 0.9
    with pytest.raises(WrongOutputError, match="y is wrong"):
        check({"y": composed(CELLS[0], inputs.eps)(inputs.x, *given)}, expect(inputs), inputs)


def test_modulations_are_chunks_of_one_tensor() -> None:
    inputs = make_inputs(ModulatedCell(Task.MODULATED, Norm.LAYER, 16, 64, samples=2, gated=True), torch.device("cpu"))
    assert [part.stride() for part in inputs.modulation] == [(6 * 64, 1)] * 3
    assert inputs.x.shape == (2, 8, 64)


@pytest.mark.parametrize(
    ("task", "gated", "whole"),
    [
        (Task.MODULATED, False, 2),
        (Task.MODULATED, True, 4),
        (Task.MODULATED_BACKWARD, False, 3),
        (Task.MODULATED_BACKWARD, True, 6),
    ],
)
def test_what_moves_is_rows_alone(task: Task, gated: bool, whole: int) -> None:
    assert ModulatedCell(task, Norm.LAYER, 16, 64, samples=2, gated=gated).bytes_moved == whole * 16 * 64 * 2


def test_cells_of_few_rows_have_as_few_samples() -> None:
    assert {cell.leading for cell in at_most(modulated.SUITE.cells, rows=8)} == {(8, 1)}
