from __future__ import annotations

import pytest
import torch

from benchmarks.cells import Cell, Method, Norm, Task, at_most, rows_of
from benchmarks.chosen import matching
from benchmarks.inputs import make_inputs
from benchmarks.providers import every_provider
from benchmarks.reach import RULES, Rule
from benchmarks.results import make_row
from benchmarks.suites import SUITES

LENGTHS = [256, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384]
LENGTHS += [32768, 65536, 131072, 262144]


@pytest.mark.parametrize("name", SUITES)
def test_ids_are_unique_and_someone_offers_each_cell(name: str) -> None:
    cells = SUITES[name].cells
    assert len({cell.id for cell in cells}) == len(cells)
    project = every_provider()["normforge"]
    assert all(project.builder(cell) for cell in cells)
    assert all(cell.group for cell in cells)


@pytest.mark.parametrize("suite", ["forward", "backward"])
@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("size", [256, 64])
def test_sweeps_have_every_length_at_both_sizes(suite: str, norm: Norm, size: int) -> None:
    of_size = [cell for cell in SUITES[suite].cells if cell.norm is norm and cell.group == f"{size} MiB"]
    cells = [cell for cell in of_size if cell.dtype == "bf16"]
    assert [cell.n for cell in cells] == LENGTHS
    assert all(0.98 * size * 2**20 < cell.m * cell.n * 2 <= size * 2**20 for cell in cells)


def test_shapes_of_a_power_of_two_fill_the_size() -> None:
    assert rows_of(256, 4096) == 32768
    assert rows_of(64, 262144) == 128
    assert rows_of(256, 1000) % 8 == 0


@pytest.mark.parametrize(
    ("task", "out_dtype", "smooth", "values"),
    [
        (Task.FORWARD, "", False, 4),
        (Task.ADD, "", False, 8),
        (Task.DROP_ADD, "", False, 8),
        (Task.QUANT, "int8", False, 3),
        (Task.ADD_QUANT, "fp8", True, 7),
        (Task.BACKWARD, "", False, 6),
    ],
)
def test_bytes_moved(task: Task, out_dtype: str, smooth: bool, values: int) -> None:
    cell = Cell(task, Norm.LAYER, 16, 64, out_dtype=out_dtype, smooth=smooth)
    assert cell.bytes_moved == values * 16 * 64
    assert cell.copy_bytes == 4 * 16 * 64


def test_the_ceiling_is_credited_with_its_own_bytes() -> None:
    cell = Cell(Task.ADD_QUANT, Norm.LAYER, 16, 64, out_dtype="fp8")
    assert make_row(cell, "copy", "ok").bytes == cell.copy_bytes
    assert make_row(cell, "eager", "ok").bytes == cell.bytes_moved


def test_ids() -> None:
    assert Cell(Task.FORWARD, Norm.RMS, 8, 64).id == "forward/rms_bf16/8x64"
    cell = Cell(Task.ADD_QUANT, Norm.LAYER, 8, 64, "fp16", "int8", smooth=True)
    assert cell.id == "add_quant/ln_fp16_int8_sdq/8x64"


def test_cells_are_chosen_by_part_or_pattern() -> None:
    ids = ["forward/ln_bf16/8x64", "forward/rms_bf16/8x64", "forward/rms_bf16/8x128"]
    assert matching(ids, []) == ids
    assert matching(ids, ["rms"]) == ids[1:]
    assert matching(ids, ["*/ln*", "8x128"]) == [ids[0], ids[2]]


def test_capped_cells_are_each_there_once() -> None:
    cells = at_most(SUITES["forward"].cells, 2)
    assert max(cell.m for cell in cells) == 2
    assert len({cell.id for cell in cells}) == len(cells)


def test_inputs_are_random_the_same_each_time_and_of_the_cells_types() -> None:
    cell = Cell(Task.ADD_QUANT, Norm.RMS, 4, 64, "fp16", "int8", smooth=True)
    first, again, other = (make_inputs(cell, torch.device("cpu"), copy) for copy in (0, 0, 1))
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)
    assert first.x.dtype == torch.float16
    assert first.bias is None
    assert first.residual is not None
    assert first.dy is None
    assert first.x.count_nonzero() > 200


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.title)
def test_each_goal_is_about_some_cell(rule: Rule) -> None:
    rows = [make_row(cell, rule.provider, "ok") for cell in SUITES[rule.suite].cells]
    assert any(rule.covers(row) for row in rows)
    assert {rule.other_cell(row) for row in rows if rule.covers(row)} <= {row.cell for row in rows}
    assert rule.copy is None or SUITES[rule.suite].has_ceiling
    assert {rule.provider, *rule.peers} <= every_provider().keys()


def test_ck_tiles_list_is_its_scripts() -> None:
    one, *cells = SUITES["ck_tile"].cells
    assert (one.m, one.n, one.dtype) == (1, 1, "bf16")
    assert {(cell.m, cell.task, cell.norm) for cell in cells} == {(700, Task.FORWARD, Norm.LAYER)}
    lengths = [80, 128, 144, 168, 184, 256, 288, 344, 376, 448, 512, 924, 1024, 1078, 1996, 4080]
    assert [(cell.dtype, cell.n) for cell in cells] == [(dtype, n) for dtype in ("bf16", "fp16") for n in lengths]


def test_the_tutorial_is_the_tutorials() -> None:
    cells = SUITES["tutorial"].cells
    assert {cell.m for cell in cells} == {4096}
    assert sorted({cell.n for cell in cells}) == [512 * i for i in range(2, 32)]
    assert {cell.task for cell in cells} == {Task.FORWARD, Task.BACKWARD}
    assert SUITES["tutorial"].method is Method.COLD
