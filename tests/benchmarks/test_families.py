"""Cells of gated, modulated and fp8 norms: their tensors, what they move, and what the oracle refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from benchmarks.cells import DTYPES, Cell, Fp8Cell, GatedCell, ModulatedCell, Norm, Task, at_most
from benchmarks.expressions import expression
from benchmarks.inputs import make_inputs
from benchmarks.oracle import WrongOutputError, check, expect
from benchmarks.providers import every_provider
from benchmarks.runner import prepare
from benchmarks.suites import SUITES, gated, modulated

CPU = torch.device("cpu")
FP8 = tuple(cell for cell in SUITES["fp8-inputs"].cells if isinstance(cell, Fp8Cell))
KINDS = tuple({cell.kind: replace(cell, m=5, n=96) for cell in FP8}.values())
MODULATED = [
    ModulatedCell(task, norm, 16, 64, samples=2, gated=branch)
    for task, norm, branch in product((Task.MODULATED, Task.MODULATED_BACKWARD), Norm, (False, True))
]
CELLS: tuple[Cell, ...] = (*at_most(gated.SUITE.cells, rows=8), *MODULATED, *KINDS)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
@pytest.mark.parametrize("name", ["eager", "normforge"])
def test_what_is_timed_is_what_the_oracle_says(name: str, cell: Cell) -> None:
    inputs = make_inputs(cell, CPU)
    prepare(every_provider()[name], [inputs], expect(inputs))


def test_another_order_is_refused() -> None:
    inputs = make_inputs(GatedCell(Task.GATED, Norm.RMS, 8, 64), CPU)
    swapped = replace(inputs, cell=GatedCell(Task.GATED, Norm.RMS, 8, 64, gate_first=True))
    function, arguments = expression(swapped, swapped.operands())
    with pytest.raises(WrongOutputError, match="y is wrong"):
        check({"y": function(*arguments)}, expect(inputs), inputs)


@pytest.mark.parametrize("name", ["scale", "shift"])
def test_another_modulation_is_refused(name: str) -> None:
    inputs = make_inputs(MODULATED[0], CPU)
    operands = inputs.operands()
    function, arguments = expression(inputs, operands | {name: operands[name] * 0.9})
    with pytest.raises(WrongOutputError, match="y is wrong"):
        check({"y": function(*arguments)}, expect(inputs), inputs)


def test_halves_of_a_projection_and_modulations_are_no_copies() -> None:
    halves = make_inputs(GatedCell(Task.GATED, Norm.RMS, 8, 64, projected=True), CPU)
    assert halves.gate is not None
    assert halves.x.stride() == halves.gate.stride() == (128, 1)
    assert halves.gate.data_ptr() - halves.x.data_ptr() == 64 * 2
    inputs = make_inputs(ModulatedCell(Task.MODULATED, Norm.LAYER, 16, 64, samples=2, gated=True), CPU)
    assert [inputs.operands()[name].stride() for name in ("scale", "shift", "gate")] == [(6 * 64, 1)] * 3
    assert inputs.x.shape == (2, 8, 64)
    assert {cell.leading for cell in at_most(modulated.SUITE.cells, rows=8)} == {(8, 1)}


@pytest.mark.parametrize(
    ("task", "branch", "whole"),
    [
        (Task.MODULATED, False, 2),
        (Task.MODULATED, True, 4),
        (Task.MODULATED_BACKWARD, False, 3),
        (Task.MODULATED_BACKWARD, True, 6),
        (Task.GATED, False, 3),
        (Task.GATED_BACKWARD, False, 5),
    ],
)
def test_what_moves_is_rows_alone(task: Task, branch: bool, whole: int) -> None:
    is_gated = task in (Task.GATED, Task.GATED_BACKWARD)
    cell = GatedCell(task, Norm.RMS, 16, 64) if is_gated else ModulatedCell(task, Norm.RMS, 16, 64, gated=branch)
    assert cell.bytes_moved == whole * 16 * 64 * 2


def test_both_types_of_fp8_and_both_kinds_of_scales_are_there() -> None:
    assert len(FP8) == len(SUITES["fp8-inputs"].cells)
    words = [f"{kind}_bf16_{scale}" for kind, scale in (("fp8", "row"), ("fp8", "tensor"), ("fp8_e5m2", "row"))]
    assert {cell.kind for cell in KINDS} == {f"{norm.value}_{word}" for norm in Norm for word in words}
    # x is read in one byte and y written in two; a copy reads and writes one.
    assert all(cell.bytes_moved == 3 * cell.m * cell.n for cell in FP8)
    assert all(cell.copy_bytes == 2 * cell.m * cell.n for cell in FP8)
    for cell in KINDS:
        inputs = make_inputs(cell, CPU)
        assert inputs.x.dtype == DTYPES[cell.dtype]
        assert inputs.x_scale is not None
        assert inputs.x_scale.shape == ((1, 1) if cell.one_scale else (cell.m, 1))


@pytest.mark.parametrize("norm", Norm)
def test_the_oracle_is_of_the_scaled_rows(norm: Norm) -> None:
    """A scale a row is nearly nothing to a norm; eps tells, and so does a row of small values."""
    inputs = make_inputs(next(one for one in KINDS if one.norm is norm and not one.one_scale), CPU)
    assert inputs.x_scale is not None
    small = replace(inputs, x_scale=inputs.x_scale * 1e-3)
    s = inputs.x.double() * (inputs.x_scale * 1e-3).double()
    s = s - s.mean(-1, keepdim=True) if norm is Norm.LAYER else s
    wanted = s / (s.square().mean(-1, keepdim=True) + inputs.eps).sqrt() * inputs.weight.double()
    wanted = wanted if inputs.bias is None else wanted + inputs.bias.double()
    torch.testing.assert_close(expect(small)["y"].double(), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(WrongOutputError, match="y is wrong"):
        check({"y": expect(inputs)["y"].bfloat16()}, expect(small), small)
    with pytest.raises(WrongOutputError, match=r"not \(5, 96\) torch\.bfloat16"):
        check({"y": expect(small)["y"]}, expect(small), small)


@pytest.mark.parametrize("norm", Norm)
def test_the_oracles_gradients_are_those_of_the_formula_written_out(norm: Norm) -> None:
    inputs = make_inputs(Cell(Task.BACKWARD, norm, 5, 96), CPU)
    assert inputs.dy is not None
    x, dy = inputs.x.double(), inputs.dy.double()
    centred = x - x.mean(-1, keepdim=True) if norm is Norm.LAYER else x
    rstd = (centred.square().mean(-1, keepdim=True) + inputs.eps).rsqrt()
    h, g = centred * rstd, dy * inputs.weight.double()
    shift = g.mean(-1, keepdim=True) if norm is Norm.LAYER else 0.0
    found = expect(inputs)
    wanted = {"dx": (g - h * (g * h).mean(-1, keepdim=True) - shift) * rstd, "dweight": (dy * h).sum(0)}
    wanted |= {"dbias": dy.sum(0)} if norm is Norm.LAYER else {}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name].double(), tensor, rtol=1e-5, atol=1e-5)
