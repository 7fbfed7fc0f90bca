"""The suites: cells have names of their own, providers, inputs of their types, and the bytes that they move; draws."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from unittest.mock import Mock

import pytest
import torch

import normforge
from benchmarks.cells import (
    DTYPES,
    Cell,
    Fp8Cell,
    GatedCell,
    ModulatedCell,
    Norm,
    QuantisedCell,
    RotaryCell,
    Task,
    at_most,
)
from benchmarks.inputs import make_inputs
from benchmarks.oracle import expect
from benchmarks.providers import every_provider
from benchmarks.results import make_row
from benchmarks.runner import prepare
from benchmarks.suites import SUITES, sweep
from benchmarks.suites.batch_invariant import GROUPS, PROVIDER


@pytest.mark.parametrize("name", SUITES)
def test_ids_are_unique_and_someone_offers_each_cell(name: str) -> None:
    cells = SUITES[name].cells
    assert len({cell.id for cell in cells}) == len(cells)
    project = every_provider()["normforge"]
    assert all(project.builder(cell) for cell in cells)
    assert all(cell.group for cell in cells)


@pytest.mark.parametrize(
    ("cell", "moved"),
    [
        (Cell(Task.FORWARD, Norm.LAYER, 16, 64), 4),
        (Cell(Task.ADD, Norm.LAYER, 16, 64), 8),
        (Cell(Task.DROP_ADD, Norm.LAYER, 16, 64), 8),
        (Cell(Task.QUANT, Norm.LAYER, 16, 64, out_dtype="int8"), 3),
        (Cell(Task.ADD_QUANT, Norm.LAYER, 16, 64, out_dtype="fp8", smooth=True), 7),
        (Cell(Task.BACKWARD, Norm.LAYER, 16, 64), 6),
        (Fp8Cell(Task.SCALED, Norm.LAYER, 16, 64), 3),
        (GatedCell(Task.GATED, Norm.RMS, 16, 64), 6),
        (GatedCell(Task.GATED_BACKWARD, Norm.RMS, 16, 64), 10),
        (ModulatedCell(Task.MODULATED, Norm.RMS, 16, 64), 4),
        (Cell(Task.RENORMED, Norm.RMS, 16, 64), 8),
        (Cell(Task.RENORMED_BACKWARD, Norm.RMS, 16, 64), 12),
        (RotaryCell(Task.ROTARY, Norm.RMS, 32, 64), 5),
        (RotaryCell(Task.ROTARY_BACKWARD, Norm.RMS, 32, 64), 7.5),
        (ModulatedCell(Task.MODULATED, Norm.RMS, 16, 64, gated=True), 8),
        (ModulatedCell(Task.MODULATED_BACKWARD, Norm.RMS, 16, 64), 6),
        (ModulatedCell(Task.MODULATED_BACKWARD, Norm.RMS, 16, 64, gated=True), 12),
        # Scales are written too.
        (QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 8, 512, static=True), 7),
        (QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 8, 512), 7 + 4 / 512),
        (QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 8, 512, columns=128), 7 + 16 / 512),
        (QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 8, 512, columns=128, column_major=True, packed=True), 7 + 4 / 512),
        (QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 8, 512, columns=128, unquantised=True), 9 + 16 / 512),
        (QuantisedCell(Task.LATENTS, Norm.RMS, 8, 512, columns=128, way="apart", kv_columns=256), (3 + 16 / 512) * 1.5),
    ],
    ids=lambda value: value.id if isinstance(value, Cell) else str(value),
)
def test_bytes_an_element_are_those_of_whole_tensors_and_of_scales(cell: Cell, moved: float) -> None:
    assert cell.bytes_moved == moved * cell.m * cell.n
    assert cell.copy_bytes == 2 * DTYPES[cell.dtype].itemsize * cell.m * cell.n


def test_the_ceiling_is_credited_with_its_own_bytes() -> None:
    cell = Cell(Task.ADD_QUANT, Norm.LAYER, 16, 64, out_dtype="fp8")
    assert make_row(cell, "copy", "ok").bytes == cell.copy_bytes
    assert make_row(cell, "eager", "ok").bytes == cell.bytes_moved


def test_inputs_are_random_the_same_each_time_and_of_the_cells_types() -> None:
    cell = Cell(Task.ADD_QUANT, Norm.RMS, 4, 64, "fp16", "int8", smooth=True)
    first, again, other = (make_inputs(cell, torch.device("cpu"), copy) for copy in (0, 0, 1))
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)
    assert first.x.dtype == torch.float16
    assert first.x.count_nonzero() > 200


def test_halves_of_a_projection_and_modulations_are_no_copies() -> None:
    halves = make_inputs(GatedCell(Task.GATED, Norm.RMS, 8, 64, projected=True), torch.device("cpu"))
    assert halves.gate is not None
    assert halves.x.stride() == halves.gate.stride() == (128, 1)
    assert halves.gate.data_ptr() - halves.x.data_ptr() == 64 * 2
    cell = ModulatedCell(Task.MODULATED, Norm.LAYER, 16, 64, samples=2, gated=True)
    inputs = make_inputs(cell, torch.device("cpu"))
    assert [inputs.operands()[name].stride() for name in ("scale", "shift", "gate")] == [(6 * 64, 1)] * 3
    assert inputs.x.shape == (2, 8, 64)
    assert {cell.leading for cell in at_most(SUITES["modulated"].cells, rows=8)} == {(8, 1)}


def test_batch_invariant_calls_are_invariant_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = Mock(wraps=normforge.batch_invariant)
    monkeypatch.setattr(normforge, "batch_invariant", entered)
    inputs = make_inputs(Cell(Task.ADD_QUANT, Norm.LAYER, 2, 96, out_dtype="fp8", group=GROUPS[0]), torch.device("cpu"))
    prepare(every_provider()[PROVIDER], [inputs], expect(inputs))
    entered.assert_called()


SEEDS = (0, 2**70)
TURN = 168
draw = cache(sweep.draw)


def test_a_seed_decides_the_cells() -> None:
    assert len({draw(seed) for seed in SEEDS}) == len(SEEDS)
    assert SUITES["sweep"].cells == draw(0)
    assert SUITES["sweep"].of_seed(3).cells == sweep.draw(3)
    assert SUITES["forward"].of_seed(3) is SUITES["forward"]


def test_results_name_their_seed_so_it_means_the_same_cells_for_good() -> None:
    """On any Python: one that draws others would go on with a file of other cells, and say nothing."""
    ids = "\n".join(cell.id for cell in draw(0)[: 8 * TURN])
    assert sha256(ids.encode()).hexdigest() == DIGEST


DIGEST = "0a583690ef39f0080ac8023fa989f15b790f15c9bc78168f8d86075485af205e"
