"""Cells of fp16 and fp32 beside those of bf16: which suites have them, that they are few, and right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks.cells import DTYPES, Cell, GatedCell, GroupCell, cell_of
from benchmarks.inputs import make_inputs
from benchmarks.oracle import TOLERANCES, expect
from benchmarks.providers import every_provider
from benchmarks.runner import prepare
from benchmarks.suites import SUITES
from benchmarks.suites.shapes import OTHER_DTYPES

# Those whose kernels differ with the dtype. The others have the dtypes that they were given (the tutorial's, ck_tile's,
# those of engines), or time what no dtype changes: the host, and what a tile for every M costs.
MIXED = ("forward", "backward", "quant", "dropout", "decode", "heads", "gated", "modulated", "groupnorm")


def _small(cell: Cell) -> Cell:
    if isinstance(cell, GroupCell):
        return cell_of(cell.task, (2, 64, 3, 4), channels_last=cell.channels_last, silu=cell.silu, dtype=cell.dtype)
    if isinstance(cell, GatedCell):
        return replace(cell, m=5, n=96, columns=48 if cell.columns else 0)
    return replace(cell, m=4, n=96)


OTHERS = {
    name: [cell for cell in SUITES[name].cells if cell.dtype in OTHER_DTYPES and cell.group != "ck_tile's default"]
    for name in MIXED
}
KINDS = tuple({small.id: small for cells in OTHERS.values() for small in map(_small, cells)}.values())


@pytest.mark.parametrize("name", MIXED)
def test_a_suite_has_two_or_three_shapes_a_kind_and_no_more_in_all_than_of_bf16(name: str) -> None:
    assert set(OTHER_DTYPES) == DTYPES.keys() - {"bf16", "int8", "fp8", "fp8_e5m2"}
    cells, counts = OTHERS[name], Counter(cell.dtype for cell in SUITES[name].cells)
    assert all(counts[dtype] >= 2 for dtype in OTHER_DTYPES)
    assert len(cells) < counts["bf16"]
    for cell in cells:
        # What is timed in bf16 is timed in each of the others.
        tasks = {other.task for other in cells if other.dtype != cell.dtype}
        assert cell.task in tasks
    shapes = Counter((cell.task, cell.norm, cell.kind) for cell in cells)
    assert max(shapes.values()) <= (4 if name in ("forward", "backward") else 3)


def test_fp32_goes_backward_too() -> None:
    for name in ("backward", "heads", "gated", "modulated", "groupnorm"):
        assert any(cell.dtype == "fp32" and cell.task.differentiates for cell in OTHERS[name])
    assert {cell.id for cell in OTHERS["forward"]} >= {"forward/rms_fp32/2048x8192", "forward/ln_fp32/2048x8192"}


@pytest.mark.parametrize("cell", KINDS, ids=lambda cell: cell.id)
@pytest.mark.parametrize("name", ["eager", "normforge"])
def test_what_is_timed_is_of_the_dtype_and_right(name: str, cell: Cell) -> None:
    inputs = make_inputs(cell, torch.device("cpu"))
    assert inputs.x.dtype == DTYPES[cell.dtype]
    assert inputs.x.dtype in TOLERANCES
    prepare(every_provider()[name], [inputs], expect(inputs))
