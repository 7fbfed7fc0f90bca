"""Cells of fp8 inputs: what is drawn, what moves, what is computed, and what the oracle refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.cells import DTYPES, Norm
from benchmarks.fp8_cells import Fp8Cell
from benchmarks.inputs import Inputs, make_inputs
from benchmarks.oracle import WrongOutputError, check, expect
from benchmarks.providers import every_provider
from benchmarks.runner import prepare
from benchmarks.suites import SUITES

CPU = torch.device("cpu")
CELLS: tuple[Fp8Cell, ...] = tuple(cell for cell in SUITES["fp8-inputs"].cells if isinstance(cell, Fp8Cell))
KINDS = tuple({cell.kind: replace(cell, m=5, n=96) for cell in CELLS}.values())


def test_both_types_and_both_kinds_of_scales_are_there() -> None:
    assert len(CELLS) == len(SUITES["fp8-inputs"].cells)
    words = [f"{kind}_bf16_{scale}" for kind, scale in (("fp8", "row"), ("fp8", "tensor"), ("fp8_e5m2", "row"))]
    assert {cell.kind for cell in KINDS} == {f"{norm.value}_{word}" for norm in Norm for word in words}
    # x is read in one byte and y written in two; a copy reads and writes one.
    assert all(cell.bytes_moved == 3 * cell.m * cell.n for cell in CELLS)
    assert all(cell.copy_bytes == 2 * cell.m * cell.n for cell in CELLS)


def _drawn(cell: Fp8Cell) -> tuple[Inputs, torch.Tensor]:
    inputs = make_inputs(cell, CPU)
    assert inputs.x_scale is not None
    assert inputs.x.dtype == DTYPES[cell.dtype]
    assert inputs.x_scale.shape == ((1, 1) if cell.one_scale else (cell.m, 1))
    return inputs, inputs.x_scale


@pytest.mark.parametrize("cell", KINDS, ids=lambda cell: cell.kind)
@pytest.mark.parametrize("name", ["eager", "normforge"])
def test_what_is_timed_is_what_the_oracle_says(name: str, cell: Fp8Cell) -> None:
    inputs, _ = _drawn(cell)
    prepare(every_provider()[name], [inputs], expect(inputs))


@pytest.mark.parametrize("norm", Norm)
def test_the_oracle_is_of_the_scaled_rows(norm: Norm) -> None:
    """A scale a row is nearly nothing to a norm; eps tells, and so does a row of small values."""
    cell = next(one for one in KINDS if one.norm is norm and not one.one_scale and one.dtype == "fp8")
    inputs, scale = _drawn(cell)
    small = replace(inputs, x_scale=scale * 1e-3)
    s = inputs.x.double() * (scale * 1e-3).double()
    s = s - s.mean(-1, keepdim=True) if norm is Norm.LAYER else s
    wanted = s / (s.square().mean(-1, keepdim=True) + inputs.eps).sqrt() * inputs.weight.double()
    wanted = wanted if inputs.bias is None else wanted + inputs.bias.double()
    torch.testing.assert_close(expect(small)["y"].double(), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(WrongOutputError, match="y is wrong"):
        check({"y": expect(inputs)["y"].bfloat16()}, expect(small), small)
    with pytest.raises(WrongOutputError, match=r"not \(5, 96\) torch\.bfloat16"):
        check({"y": expect(small)["y"]}, expect(small), small)
