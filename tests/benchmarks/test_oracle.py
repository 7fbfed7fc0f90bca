"""What is timed is what the oracle says, for every kind of cell; what is wrong is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.cells import DTYPES, Cell, Fp8Cell, GatedCell, GroupCell, ModulatedCell, Norm, QuantisedCell, Task
from benchmarks.inputs import make_inputs
from benchmarks.oracle import WrongOutputError, check, expect
from benchmarks.providers import every_provider
from benchmarks.runner import prepare
from benchmarks.suites import SUITES

from ..calling import there

CPU = torch.device("cpu")


def _small(cell: Cell) -> Cell:
    """Return a cell of the same kind with few rows and columns."""
    if isinstance(cell, GroupCell):
        return replace(cell, m=2 * cell.groups, n=768 // cell.groups, shape=(2, 64, 3, 4))
    if isinstance(cell, GatedCell):
        return replace(cell, m=5, n=96, columns=48 if cell.columns else 0)
    if isinstance(cell, ModulatedCell):
        return replace(cell, m=16, n=64, samples=2)
    if isinstance(cell, QuantisedCell):
        # As short as packed scales of four groups can be.
        return replace(cell, m=5, n=512)
    return replace(cell, m=8, n=96, heads=(4, 12)) if cell.heads[0] else replace(cell, m=5, n=96)


KINDS = {(cell.task, cell.kind): _small(cell) for suite in SUITES.values() for cell in suite.cells}


@pytest.mark.parametrize("cell", KINDS.values(), ids=lambda cell: cell.id)
@pytest.mark.parametrize("name", ["eager", "normforge"])
def test_what_is_timed_is_what_the_oracle_says(name: str, cell: Cell) -> None:
    inputs = make_inputs(cell, CPU)
    expected = expect(inputs)
    assert inputs.x.dtype == DTYPES[cell.dtype]
    if isinstance(cell, QuantisedCell):
        assert ("unquantised" in expected, "residual_out" in expected) == (cell.unquantised, cell.task.adds)
    (call,) = prepare(every_provider()[name], [inputs], expected)
    call()


@pytest.mark.parametrize("norm", Norm)
def test_the_oracle_is_of_the_scaled_rows(norm: Norm) -> None:
    """A scale a row is nearly nothing to a norm; eps tells, and so does a row of small values."""
    inputs: Any = make_inputs(Fp8Cell(Task.SCALED, norm, 5, 96), CPU)
    small = replace(inputs, x_scale=inputs.x_scale * 1e-3)
    s = inputs.x.double() * (inputs.x_scale * 1e-3).double()
    s = s - s.mean(-1, keepdim=True) if norm is Norm.LAYER else s
    wanted = s / (s.square().mean(-1, keepdim=True) + inputs.eps).sqrt() * inputs.weight.double()
    wanted = wanted if inputs.bias is None else wanted + inputs.bias.double()
    torch.testing.assert_close(expect(small)["y"].double(), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(WrongOutputError, match="y is wrong"):
        check({"y": expect(inputs)["y"].bfloat16()}, expect(small), small)


def _changed(at: Any, change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What changes some elements of a tensor."""

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        spoilt = tensor.clone()
        spoilt[at] = change(tensor[at])
        return spoilt

    return spoil


def _times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: (tensor.float() * factor).to(tensor.dtype)


def _quantised(**options: Any) -> QuantisedCell:
    return QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 5, 512, **options)


FORWARD, BACKWARD = (Cell(task, Norm.LAYER, 5, 96) for task in (Task.FORWARD, Task.BACKWARD))
INT8 = Cell(Task.QUANT, Norm.LAYER, 5, 96, "fp16", "int8")
GROUPS = _quantised(columns=128)
COLUMN = _quantised(columns=128, column_major=True)
PACKED = _quantised(columns=128, column_major=True, packed=True)


@pytest.mark.parametrize(
    ("cell", "name", "spoil", "message"),
    [
        (FORWARD, "y", torch.Tensor.float, r"y is \(5, 96\) torch.float32, not \(5, 96\) torch.bfloat16"),
        (FORWARD, "y", _changed((2, 3), lambda _: float("nan")), "y is wrong"),
        *((BACKWARD, name, _changed((..., 7), torch.neg), f"{name} is wrong") for name in ("dx", "dweight", "dbias")),
        (INT8, "y", _changed((1, 1), lambda y: y + 2 if y < 0 else y - 2), "y is wrong"),
        (Fp8Cell(Task.SCALED, Norm.RMS, 5, 96), "y", torch.Tensor.float, r"not \(5, 96\) torch\.bfloat16"),
        (GROUPS, "y_scale", lambda scale: scale.roll(1, -1), "y_scale is wrong"),
        (GROUPS, "y_scale", lambda scale: scale[:, :2], "y_scale is .5, 2. torch.float32, not .5, 4."),
        (GROUPS, "y_scale", lambda scale: scale.t().contiguous().t(), "the other layout"),
        (COLUMN, "y_scale", torch.Tensor.contiguous, "the other layout"),
        (PACKED, "y_scale", lambda scale: scale + 2, "is wrong"),
        (PACKED, "y_scale", lambda scale: scale - 1, "is wrong"),
        (GROUPS, "y", lambda y: y.roll(1, -1), "y is wrong"),
        (_quantised(static=True), "y", _times(1.2), "y is wrong"),
        (_quantised(columns=128, unquantised=True), "unquantised", _times(1.1), "unquantised is wrong"),
        (_quantised(), "y_scale", _times(1.1), "y_scale is wrong"),
    ],
)
def test_what_is_wrong_or_missing_is_refused(
    cell: Cell, name: str, spoil: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    inputs = make_inputs(cell, CPU)
    prepared = there(every_provider()["eager"].builder(cell))(inputs)
    outputs, expected = prepared.outputs(prepared.call()), expect(inputs)
    check(outputs, expected, inputs)
    with pytest.raises(WrongOutputError, match=message):
        check(outputs | {name: spoil(outputs[name])}, expected, inputs)
    with pytest.raises(WrongOutputError, match=f"{name} is missing"):
        check({other: tensor for other, tensor in outputs.items() if other != name}, expected, inputs)


def test_a_dropout_is_held_to_the_mask_that_it_drew() -> None:
    inputs = make_inputs(Cell(Task.DROP_ADD, Norm.LAYER, 64, 96), CPU)

    def outputs(p: float, factor: float) -> dict[str, torch.Tensor]:
        total = torch.nn.functional.dropout(inputs.x, p) * factor + there(inputs.residual)
        y = torch.nn.functional.layer_norm(total, (96,), inputs.weight, inputs.bias, inputs.eps)
        return {"y": y, "residual_out": total}

    expected = expect(inputs)
    check(outputs(0.1, 1.0), expected, inputs)
    for found, message in (
        (outputs(0.3, 0.7 / 0.9), r"a share of 0\.\d+ is dropped, not 0\.1"),
        (outputs(0.1, 0.9), r"^(y|residual_out) is wrong"),
        ({}, "residual_out is missing"),
    ):
        with pytest.raises(WrongOutputError, match=message):
            check(found, expected, inputs)


def test_a_peer_may_be_allowed_more_of_some_outputs() -> None:
    inputs = make_inputs(replace(BACKWARD, dtype="fp16"), CPU)
    expected = expect(inputs)
    outputs = {name: value.to(torch.float16) for name, value in expected.items()}
    outputs["dweight"] += 0.01 * expected["dweight"].square().mean().sqrt()
    check(outputs, expected, inputs, {"dweight": 8.0})
    for allowances in ({}, {"dbias": 8.0}):
        with pytest.raises(WrongOutputError, match="dweight is wrong"):
            check(outputs, expected, inputs, allowances)
