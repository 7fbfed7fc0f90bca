"""The suites: which cells they have, what these move and are called, and which goals are about them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from benchmarks.cells import (
    DTYPES,
    Cell,
    Fp8Cell,
    GatedCell,
    Method,
    ModulatedCell,
    Norm,
    QuantisedCell,
    Task,
    at_most,
)
from benchmarks.chosen import matching
from benchmarks.inputs import make_inputs
from benchmarks.providers import every_provider
from benchmarks.reach import RULES, Rule
from benchmarks.results import make_row
from benchmarks.suites import SUITES, quantised, quantised_decode
from benchmarks.suites.batch_invariant import PROVIDER
from benchmarks.suites.shapes import OTHER_DTYPES

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
        (ModulatedCell(Task.MODULATED, Norm.RMS, 16, 64, gated=True), 8),
        (ModulatedCell(Task.MODULATED_BACKWARD, Norm.RMS, 16, 64), 6),
        (ModulatedCell(Task.MODULATED_BACKWARD, Norm.RMS, 16, 64, gated=True), 12),
        # Scales are written too.
        (QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 8, 512, static=True), 7),
        (QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 8, 512), 7 + 4 / 512),
        (QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 8, 512, columns=128), 7 + 16 / 512),
        (QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 8, 512, columns=128, column_major=True, packed=True), 7 + 4 / 512),
        (QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 8, 512, columns=128, unquantised=True), 9 + 16 / 512),
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


# Suites whose kernels differ with the dtype. Others have the dtypes that they were given (the tutorial's, ck_tile's,
# those of engines), or time what no dtype changes: the host, and what a tile for every M costs.
MIXED = ("forward", "backward", "quant", "dropout", "decode", "heads", "gated", "modulated", "groupnorm")


@pytest.mark.parametrize("name", MIXED)
def test_other_dtypes_have_two_or_three_shapes_a_kind_and_no_more_in_all_than_bf16(name: str) -> None:
    assert set(OTHER_DTYPES) == DTYPES.keys() - {"bf16", "int8", "fp8", "fp8_e5m2"}
    suite = SUITES[name].cells
    cells = [cell for cell in suite if cell.dtype in OTHER_DTYPES and cell.group != "ck_tile's default"]
    counts = Counter(cell.dtype for cell in suite)
    assert all(counts[dtype] >= 2 for dtype in OTHER_DTYPES)
    assert len(cells) < counts["bf16"]
    # What is timed in one of them is timed in each, and backward in fp32 wherever in bf16.
    tasks = [{cell.task for cell in cells if cell.dtype == dtype} for dtype in OTHER_DTYPES]
    assert all(tasks[0] == each for each in tasks)
    backward = {cell.task for cell in suite if cell.task.differentiates}
    assert backward <= tasks[0]
    shapes = Counter((cell.task, cell.norm, cell.kind) for cell in cells)
    assert max(shapes.values()) <= (4 if name in ("forward", "backward") else 3)


def test_both_quantised_suites_have_the_same_kinds_of_their_rows() -> None:
    shapes = [
        {(cell.task, cell.kind, cell.m // rows, cell.n) for cell in suite.cells if cell.m == rows}
        for suite, every in ((quantised.SUITE, (1024, 4096, 16384)), (quantised_decode.SUITE, (16, 64, 256)))
        for rows in every
    ]
    assert all(one == shapes[0] for one in shapes)
    added = {(norm, n) for task, kind, _, n in shapes[0] if task is Task.ADD_QUANTISED for norm in [kind.split("_")[0]]}
    assert added == {(norm.value, n) for norm in Norm for n in (2048, 4096, 5120, 7168, 8192)}


def test_both_types_of_fp8_and_both_kinds_of_scales_are_there() -> None:
    cells = [cell for cell in SUITES["fp8-inputs"].cells if isinstance(cell, Fp8Cell)]
    assert len(cells) == len(SUITES["fp8-inputs"].cells)
    words = ("fp8_bf16_row", "fp8_bf16_tensor", "fp8_e5m2_bf16_row")
    assert {cell.kind for cell in cells} == {f"{norm.value}_{word}" for norm in Norm for word in words}
    for cell in at_most(cells, rows=8):
        assert isinstance(cell, Fp8Cell)
        scale = make_inputs(cell, torch.device("cpu")).x_scale
        assert scale is not None
        assert scale.shape == ((1, 1) if cell.one_scale else (cell.m, 1))


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


def test_batch_invariance_is_timed_of_every_kind_of_kernel_on_both_sides_of_256_rows() -> None:
    few, many = SUITES["batch-invariant"].cells, SUITES["batch-invariant-many"].cells
    tasks = (Task.FORWARD, Task.ADD, Task.QUANT, Task.ADD_QUANT, Task.BACKWARD)
    kinds = {(task, norm) for task in tasks for norm in Norm}
    assert {(cell.task, cell.norm) for cell in few} == kinds == {(cell.task, cell.norm) for cell in many}
    assert max(cell.m for cell in few) == 256
    assert min(cell.m for cell in many) == 257
    provider = every_provider()[PROVIDER]
    assert all(provider.builder(cell) for cell in (*few, *many))
    assert not provider.builder(Cell(Task.FORWARD, Norm.LAYER, 257, 64, group="elsewhere"))
