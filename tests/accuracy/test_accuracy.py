"""The accuracy table: a slice in the interpreter, the whole on a card, that it shows what it should, and its units."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import replace
from importlib import import_module
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.pages import section
from normforge.codegen.groups import GroupMode
from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.values import Direction, DType, Gating, Norm, Pipeline
from normforge.tools.machine import find_machine
from proving.accuracy.cases import CAST_MODES, MODES, AnyCase, Case, GroupCase, Layout, cases, forced
from proving.accuracy.command import main
from proving.accuracy.measure import Cell, measure
from proving.accuracy.report import Outcome, outcome_of, summary, table
from proving.accuracy.rows import KINDS
from proving.accuracy.run import attempt, run
from proving.accuracy.units import Error, Exact, error, floor_of, median, ratio, rounded, ulp
from proving.cases import FULL
from proving.evidence import EVIDENCE, load
from tests.calling import table_at
from tests.thorough import COSTLY, THOROUGH, first_of_each

# NumPy, which interprets kernels, remarks on squares that overflow.
interpreted = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
SEED = 0
NAMES: list[str] = yaml.safe_load(Path(__file__).with_name("slice.yaml").read_text())
HEADS = [Layout.HEADS, Layout.HEADS_IN_PLACE]
GROUPS = [case for case in cases(CPU) if isinstance(case, GroupCase)]
ROWS = [case for case in cases(CPU) if isinstance(case, Case)]
SLICE = [case for case in ROWS if case.mode.name in NAMES and case.layout is Layout.ADJOINING]
# What lies as heads is read at other addresses, whatever its type: a card runs fp32 too.
SLICE += [case for case in ROWS if case.layout is not Layout.ADJOINING and case.mode.dtype_in is DType.BF16]


def told(cells: list[Cell]) -> str:
    return "\n".join(str(cell) for cell in cells if not cell.ok)


def kind_of(case: Case) -> Hashable:
    """Each tile of each direction, for what the types change is little; roundings and layouts at one length."""
    mode = case.mode
    if mode.statistics_only or mode.fadd.renorms or not mode.norm.averages:
        return (mode.norm, mode.direction, mode.fadd, case.layout) if case.n == 100 else None
    if mode.dropout or mode.gating.gates:
        return (mode.direction, mode.fquant, mode.dropout, mode.gating) if case.n == 100 else None
    if mode.cast.comes_first or case.layout is not Layout.ADJOINING:
        return (mode.direction, mode.fquant, mode.cast, case.layout) if case.n == 100 else None
    return mode.direction, case.tile


ONE_A_TILE = first_of_each(SLICE, kind_of, lambda case: case.name)
ONE_OF_GROUPS = first_of_each(
    # A case of long groups is interpreted for 15 s: one for each direction, and a card runs the others.
    [each for each in GROUPS if each.n < 4000 or each.mode in (GroupMode(DType.FP32, way) for way in Direction)],
    lambda case: (
        (case.mode.direction, case.mode.activation) if case.n == 104 and case.mode.dtype_in is DType.FP32 else None
    ),
    lambda case: case.name,
)


# Around a pivot of their head, which was far from their mean, products lost bits. Groups that one program has whole
# take one kernel.
_GATED = Tile(Pipeline.ONE_PASS, 1, 4096, 16)
_WHOLE = Tile(Pipeline.TWO_PASS, 1, 2048, 8, held=2)
SPECIAL: list[AnyCase] = [
    *(
        Case(Mode(Norm.LAYER, DType.BF16, out, gating=Gating.BEFORE_NORM, save_mv=True), 8192, _GATED)
        for out in (DType.BF16, DType.FP32)
    ),
    *(GroupCase(GroupMode(DType.FP32, direction), 1000, _WHOLE) for direction in Direction),
]


@COSTLY
@interpreted
@pytest.mark.parametrize(
    "case", [*ONE_A_TILE, *ONE_OF_GROUPS, *(pytest.param(each, id=each.mode.name) for each in SPECIAL)]
)
def test_no_error_is_over_four_times_torchs(case: AnyCase) -> None:
    found = measure(case, CPU, SEED)
    assert all(cell.ok for cell in found), told(found)


@THOROUGH
@interpreted
def test_most_errors_are_at_most_torchs() -> None:
    found = [cell for case in SLICE if case.n == 100 for cell in measure(case, CPU, SEED)]
    assert sum(cell.ratio <= 1 for cell in found) > len(found) / 2


@pytest.mark.gpu
def test_the_whole_table_on_a_card() -> None:
    machine = find_machine()
    outcome = outcome_of(dict(run(cases(machine.device), machine.device, SEED, jobs=min(16, os.cpu_count() or 1))))
    assert outcome.ok, "\n".join((told(outcome.failing), *outcome.broken))


@pytest.mark.parametrize("where", ["interpreted", "compiled"])
def test_every_pipeline_is_measured_in_every_dtype_and_of_heads(where: str) -> None:
    found = {(case.mode, case.tile.pipeline) for case in forced(where)}
    # Programs that share a row exchange fp32 means, too coarse for fp32 rows: no table may spread them.
    assert found >= {
        (mode, pipeline)
        for mode in chain(*MODES.values(), *CAST_MODES.values())
        for pipeline in mode.pipelines
        if pipeline is not Pipeline.SPREAD or mode.is_backward or mode.dtype_in.itemsize == 2
    }
    heads = {(case.mode.direction, case.mode.norm, case.tile.pipeline, case.layout) for case in forced(where)}
    assert heads >= {*product([Direction.FORWARD], FULL, Pipeline, [Layout.ADJOINING, *HEADS])}
    together = [pipeline for pipeline in Pipeline if pipeline.takes_rows_alike]
    assert heads >= {*product([Direction.FORWARD], [Norm.RMS], together, [Layout.TOGETHER])}
    assert heads >= {*product([Direction.BACKWARD], FULL, Pipeline, [Layout.HEADS])}


Spoiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def off(by: float) -> Spoiler:
    def scaled(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: value * (1 + by) for name, value in values.items()}
        return values * (1 + by)

    return lambda honest: lambda *given: scaled(honest(*given))


def said(dtype: torch.dtype | None) -> Spoiler:
    return lambda honest: lambda mode: dtype


def further(honest: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Rows are read one head further: behind the heads of a token lies what is NaN."""

    def laid(*given: Any) -> torch.Tensor:
        heads = honest(*given)
        return heads.as_strided(heads.shape, heads.stride(), heads.shape[-1])

    return laid


@interpreted
@pytest.mark.parametrize(
    ("name", "layout", "place", "spoiler", "outputs"), table_at(Path(__file__).with_name("off.yaml"), globals())
)
def test_what_is_off_is_told(
    name: str, layout: str, place: str, spoiler: Spoiler, outputs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, function = place.partition(".")
    home = import_module(f"proving.accuracy.{module}")
    monkeypatch.setattr(home, function, spoiler(getattr(home, function)))
    case = next(c for c in cases(CPU) if c.mode.name == name and c.n == 100 and c.layout.value == layout)
    found = [cell for cell in measure(case, CPU, SEED) if cell.kind in ("random", "outlier")]
    assert {cell.output for cell in found if not cell.ok} == {*outputs}


def test_a_case_that_cannot_run_is_told() -> None:
    case = next(case for case in SLICE if case.mode.name == "ln_fwd_fp32_mv")
    impossible = replace(case, tile=replace(case.tile, block=100))
    assert isinstance(attempt(impossible, CPU, SEED), str)


@THOROUGH
@interpreted
def test_the_command_prints_the_table_and_writes_the_document(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--only", "rms_bwd_fp32* N=100 *", "--jobs", "2"]
    assert main([*few, "--record", str(checkout), "--revision", "abc"]) == 0
    table = load(checkout, "accuracy")
    assert section(checkout / EVIDENCE, "accuracy") == summary(table)
    assert sum(int(row["cells"]) for row in table.rows) >= 48
    assert {(row["direction"], row["norm"]) for row in table.rows} == {("Backward", "RMSNorm")}
    assert all(row["random"] and row["random torch"] for row in table.rows)
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])
    assert "--only 'nonsense' matches no case; --list prints their names" in capsys.readouterr().err


FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def test_a_unit_is_the_distance_to_the_next_number() -> None:
    for dtype in FLOATS:
        values = torch.tensor([1.0, 1.5, 0.1, 777.0, 3e-5, 6e-8], dtype=torch.float64).to(dtype)
        # The bits of a positive number, counted one up, are the next one's.
        bits = values.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
        following = (bits + 1).view(dtype)
        assert torch.equal(ulp(values.double(), dtype), following.double() - values.double())


def test_correct_rounding_is_within_half_a_unit() -> None:
    exact = torch.randn(4, 1000, dtype=torch.float64)
    for dtype in FLOATS:
        found = error(exact.to(dtype), exact, torch.zeros(4, 1))
        assert 0.45 < found.largest <= 0.5
        assert 0.2 < found.rms < 0.35


def test_values_that_cancel_are_counted_in_the_unit_of_a_typical_one() -> None:
    exact = torch.tensor([[1.0, -1.5, 1e-12]], dtype=torch.float64)
    actual = exact.float()
    actual[0, 2] += 2.0**-24
    assert abs(error(actual, exact, median(exact)).largest - 0.5) < 1e-6
    assert error(actual, exact, torch.zeros(1, 1)).largest > 1e3


def test_no_right_digit_and_no_number_count_alike() -> None:
    exact = torch.tensor([1.0, 1e300], dtype=torch.float64)
    for wrong in (float("nan"), float("inf"), 1e30):
        actual = torch.tensor([wrong, float("inf")])
        assert error(actual, exact, torch.zeros(2)).largest == 2**23


def test_errors_below_the_floor_are_equal_and_above_it_compared() -> None:
    for dtype in FLOATS:
        floor = floor_of(dtype)
        assert ratio(Error(0.5 + floor, 0.3), Error(0.0, 0.0), dtype) == 1
        assert ratio(Error(0.5 + 5 * floor, 0.3), Error(0.2, 0.3), dtype) > 4
        assert ratio(Error(0.5 + 9 * floor, 0.3), Error(0.5 + 3 * floor, 0.3), dtype) < 4
        assert ratio(Error(0.5, 4 * (0.3 + floor) + 0.1), Error(0.5, 0.2), dtype) > 2.5


def test_what_is_rounded_on_the_way_may_go_either_way_at_a_tie_and_nowhere_else() -> None:
    tie = 1 + 2.0**-8  # of bf16, whose neighbours of 1 are 2**-7 apart
    rows = torch.tensor([[tie, tie + 15 * 2.0**-23, tie + 17 * 2.0**-23, 1.0]], dtype=torch.float64)
    nearest, either = rounded(rows, torch.bfloat16)
    assert nearest.tolist() == [[1.0, 1 + 2.0**-7, 1 + 2.0**-7, 1.0]]
    assert either.tolist() == [[2.0**-7, 2.0**-7, 0.0, 0.0]]
    exact = Exact(nearest, median(nearest), either)
    assert exact.error_of(torch.tensor([[1 + 2.0**-7, 1.0, 1 + 2.0**-7, 1.0]])).largest == 0
    assert exact.error_of(torch.tensor([[1.0, 1.0, 1.0, 1.0]])).largest == 2.0**-7 / 2.0**-23
    assert exact.error_of(torch.tensor([[1.0, 1.0, float("nan"), 1.0]])).largest == 2.0**23


def test_little_is_open() -> None:
    rows = torch.randn(8, 4096, dtype=torch.float64)
    for dtype, share in ((torch.float16, 0.02), (torch.bfloat16, 0.003)):
        assert 0 < (rounded(rows, dtype)[1] > 0).double().mean() < share


def cell(ours: float, theirs: float) -> Cell:
    found = Error(ours, 0.3), Error(theirs, 0.3)
    times = ratio(*found, torch.float32)
    return Cell("one_pass", "fwd", "ln_fwd_fp32_mv", "fp32", 4096, "one_pass 1 1024 4", "random", "y", *found, times)


def test_the_rule_holds_in_every_cell_and_in_most() -> None:
    good, middling, bad = cell(1.0, 1.0), cell(7.0, 3.0), cell(20.0, 1.0)
    assert Outcome([good, good, middling], []).ok
    assert not Outcome([good, middling], []).ok
    assert not Outcome([good, good, good, bad], []).ok
    assert not Outcome([good, good], ["a case: it did not compile"]).ok
    assert not Outcome([], []).ok


def test_what_fails_is_in_the_table_and_its_summary() -> None:
    good, bad = cell(1.0, 1.0), replace(cell(20.0, 1.0), kind="outlier")
    outcome = Outcome([good, bad], ["a case: OutOfResources"])
    found = table(outcome, {"device": "a card", "seed": "0"})
    page = summary(found)
    assert "1 of 2 cells are within 4 times torch's error" in page
    assert "a case: OutOfResources" in page
    assert [str(each) for each in outcome.failing] == [str(bad)]
    assert "does not hold in 1 cells of Forward one_pass LayerNorm fp32 y: 20.0 units, torch 1.0." in page
    assert "device a card, seed 0" in page
    (row,) = found.rows
    assert (row["cells"], row["beyond"], row["no worse"], row["worst rows"]) == ("2", "1", "1", "outlier")
    assert (row["random"], row["outlier"], row["outlier torch"]) == ("1.0", "20.0", "1.0")
    assert set(KINDS) < set(found.columns)
