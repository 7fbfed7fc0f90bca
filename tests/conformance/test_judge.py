"""The table of cases, and its judge, which finds what is wrong: results that are right, then with one thing amiss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.pages import section
from normforge import reference
from normforge.codegen.values import DType, Norm
from normforge.reference.norms import quantise
from proving.cases import Tensors
from proving.conformance import report
from proving.conformance.calls import arguments, results
from proving.conformance.case import BF16, FP16, FP32, Case, Mode, Y
from proving.conformance.draw import operands
from proving.conformance.judge import Finding, QuantisedTally, judge
from proving.conformance.run import Outcome, run, run_group
from proving.conformance.suites import SUITES, cases, interpreted
from proving.evidence import EVIDENCE, grouped, load, record

from ..thorough import COSTLY, first_of_each

CPU = torch.device("cpu")

_PLAIN = Case("ck_tile", Norm.LAYER, (3, 100), FP16, "ck_tile", "ck_tile", weight=FP16, bias=FP16, save_mv=True)
_ADDED = replace(_PLAIN, residual=FP16, fadd="pre_add_store")
_QUANTISED = replace(_PLAIN, out=torch.int8, fquant="dynamic", save_mv=False)
_E5M2 = replace(_QUANTISED, out=torch.float8_e5m2)
_LLAMA = replace(_PLAIN, x=BF16, weight=FP32, bias=FP32, out=FP32, cast="before_weight", shape=(20, 100))
_BACKWARD = Case("quack", Norm.LAYER, (3, 100), BF16, "quack", "quack", weight=FP32, bias=FP32, arriving=(Y,))


def right(case: Case, given: Tensors) -> Tensors:
    """Return the outputs of a forward call by the reference."""
    found = reference.layernorm2d_fwd(**arguments(case, given))
    names = ("y", "residual_out", "y_scale", "mean", "rstd")
    return {name: tensor for name in names if (tensor := getattr(found, name)) is not None}


def wrong(case: Case, given: Tensors, got: Tensors) -> list[str]:
    return [finding.output for finding in judge(case, given, got) if not finding.ok]


def _set(index: tuple[int, ...], value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.index_put([torch.tensor(i) for i in index], torch.tensor(value).to(tensor.dtype))


def _add(index: tuple[int, ...], value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: _set(index, tensor[index].item() + value)(tensor)


@pytest.mark.parametrize("case", [_PLAIN, _ADDED, _QUANTISED, _E5M2], ids=["plain", "added", "int8", "e5m2"])
def test_what_is_right_passes(case: Case) -> None:
    given = operands(case, CPU, 0)
    findings = judge(case, given, right(case, given))
    assert all(finding.ok for finding in findings), findings
    assert all(finding.own < 0.7 for finding in findings if finding.output != "y")


@pytest.mark.parametrize(
    ("case", "name", "change"),
    [
        (_PLAIN, "y", _set((2, 99), math.nan)),
        (_PLAIN, "y", _set((0, 0), math.inf)),
        (_PLAIN, "y", _add((1, 50), 2e-2)),
        (_PLAIN, "mean", _add((1,), 1e-3)),
        (_PLAIN, "rstd", lambda rstd: rstd * 1.001),
        (_PLAIN, "rstd", lambda rstd: rstd.half()),
        (_PLAIN, "y", lambda y: y[:2]),
        (_PLAIN, "mean", lambda mean: mean.new_zeros(3, 1)),
        (_ADDED, "residual_out", lambda stored: torch.nextafter(stored, stored + 1)),
        (_QUANTISED, "y", _add((0, 3), 2)),
        (_QUANTISED, "y", lambda y: (y + 1).clamp(max=127)),
        (_QUANTISED, "y_scale", lambda scale: scale * (1 + 3e-5)),
        (_E5M2, "y", _set((0, 3), math.inf)),
        # What nothing asked for, and what is missing.
        (replace(_PLAIN, save_mv=False), "mean", lambda _: torch.zeros(3)),
        *((_PLAIN, name, lambda _: None) for name in ("mean", "rstd", "y")),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_wrong_fails(case: Case, name: str, change: Callable[[Any], torch.Tensor | None]) -> None:
    given = operands(case, CPU, 0)
    got = right(case, given)
    changed = got | {name: change(got.get(name))}
    assert wrong(case, given, {each: tensor for each, tensor in changed.items() if tensor is not None})[0].startswith(
        name
    )


_BESIDE = [next(c for c in interpreted() if getattr(c, what) and c.n < 1000) for what in ("gate", "dropout_p")]
_BESIDE += [next(case for case in interpreted() if case.channels_per_group and case.n < 1000)]


@pytest.mark.parametrize("case", [_BACKWARD, *_BESIDE], ids=["norm", "gate", "dropout", "groups"])
def test_a_wrong_gradient_fails(case: Case) -> None:
    given = operands(case, CPU, 0)
    got = results(case, given)
    assert wrong(case, given, got) == []
    for name in got.keys() - {"residual_out", "keep"}:
        assert wrong(case, given, got | {name: got[name] * 1.1}) == [name]


@pytest.mark.parametrize(
    ("case", "output"),
    [
        (_LLAMA, "y"),
        (replace(_LLAMA, out=torch.int8, fquant="dynamic", save_mv=False), "y"),
        (replace(_BACKWARD, out=FP32, cast="before_weight"), "dweight"),
    ],
    ids=["plain", "int8", "gradient"],
)
def test_rows_that_are_not_rounded_before_the_weight_fail(case: Case, output: str) -> None:
    given = operands(case, CPU, 0)
    make = results if case.arriving else right
    assert wrong(case, given, make(case, given)) == []
    assert output in wrong(case, given, make(replace(case, cast="after_weight"), given))


@pytest.mark.parametrize(("shift", "ok"), [(0.0, True), (1e-5, True), (1.26e-3, False)])
def test_int8_that_is_off_too_often_fails(shift: float, ok: bool) -> None:
    """Off by a 1/800 of a step before rounding: each by itself explained, and 0.126 % of them."""
    case = replace(_QUANTISED, shape=(10000, 100))
    given = operands(case, CPU, 0)
    found: Any = reference.layernorm2d_fwd(**arguments(case, given))
    y = quantise(found.z / found.y_scale.double().unsqueeze(-1) + shift, DType.INT8)
    assert wrong(case, given, {"y": y, "y_scale": found.y_scale}) == ([] if ok else ["y"])


@pytest.mark.parametrize("raises", [False, True])
def test_a_call_that_writes_to_its_inputs_or_raises_fails(raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(case: Case, given: Tensors) -> Tensors:
        if raises:
            raise ValueError("not today")
        given["x"][0, 0] = 7.0
        return right(case, given)

    # The package's attribute of that name is the module's function.
    monkeypatch.setattr(import_module("proving.conformance.run"), "results", spoilt)
    outcome = run(_PLAIN, CPU, 0)
    assert not outcome.ok
    assert ("ValueError: not today" if raises else "inputs as they were") in str(outcome)


@pytest.mark.parametrize(
    ("got", "units"),
    [(16.0, 0.0), (22.0, 0.0), (24.0, 1.0), (26.0, math.inf), (10.0, 0.0), (9.0, 1.0), (8.0, math.inf)],
)
def test_fp8_may_be_a_step_from_what_either_rounding_before_the_weight_gives(got: float, units: float) -> None:
    """The rounding leaves 9.5005 to 22.9995 open, just within halves between two values of e4m3fn, 9.5 and 23."""
    tally = QuantisedTally(torch.float8_e4m3fn, "nearest", CPU)
    z, apart = (torch.tensor([[value]], dtype=torch.float64) for value in (16.25, 6.7495))
    tally.add(torch.tensor([[got]]).to(torch.float8_e4m3fn), z, apart)
    assert tally.units().item() == units


MODE = Mode("LayerNorm", "forward", "fp16 → fp16", "-", "-")
HEADER = {"device": "a GPU", "seed": "0"}


def _outcome(units: float, own: float = 0.5, error: str = "") -> Outcome:
    findings = () if error else (Finding("y", units, own), Finding("mean", 0.1, 0.2))
    return Outcome("a-case", "ck_tile", MODE, findings, error)


@pytest.mark.parametrize(
    ("outcomes", "row", "told"),
    [
        ([_outcome(0.2), _outcome(0.5, own=1.5), _outcome(0.4)], ("2", "1", "0.5", "y", "1.5", "y"), "y 0.5 (own 1.5)"),
        ([_outcome(0.0, error="ValueError: no")], ("0", "1", "inf", "error", "inf", "error"), "ValueError: no"),
        ([_outcome(0.25), _outcome(math.inf)], ("1", "1", "inf", "y", "0.5", "y"), "y inf (own 0.5)"),
    ],
    ids=["largest", "raised", "infinite"],
)  # fmt: skip
def test_a_row_counts_cases_and_keeps_the_largest_error(
    outcomes: list[Outcome], row: tuple[str, ...], told: str, checkout: Path
) -> None:
    assert [str(outcome) for outcome in outcomes if not outcome.ok] == [f"a-case: {told}"]
    record(checkout, "conformance", report.table(outcomes, HEADER), report.summary)
    table, text = load(checkout, "conformance"), section(checkout / EVIDENCE, "conformance")
    assert [*table.rows[0].values()] == ["ck_tile", "LayerNorm", "forward", "fp16 → fp16", "-", "-", *row]
    assert text == report.summary(table)
    assert "device a GPU, seed 0." in text
    assert f"**{row[0]} of {len(outcomes)} cases pass.**" in text
    assert "- failed: 1 of ck_tile, LayerNorm, forward, fp16 → fp16, -, -" in text
    assert f"| ck_tile | {row[0]} | 1 | {row[2]} | {row[4]} |" in text


SEED = 0


LINES = grouped(cases(), lambda case: "-".join((case.suite, *case.mode)).replace(" ", ""))


@pytest.mark.gpu
@pytest.mark.parametrize("line", LINES)
def test_on_a_gpu(line: str) -> None:
    outcomes = run_group(LINES[line], torch.device("cuda"), SEED)
    assert [str(outcome) for _, outcome in outcomes if not outcome.ok] == []


def kind_of(case: Case) -> Hashable:
    """A mode, whatever its weight's type, row length and suite; beside a norm, what there is, whatever types are."""
    if case.is_beside:
        return (case.family, case.norm, case.gate_first, case.channels_last) if case.n < 1000 else None
    return case.mode, bool(case.arriving)


ONE_A_MODE = first_of_each(interpreted(), kind_of, lambda case: case.id)


@COSTLY
@pytest.mark.parametrize("case", ONE_A_MODE)
def test_in_the_interpreter(case: Case) -> None:
    for _, outcome in run_group((case,), torch.device("cpu"), SEED):
        assert outcome.ok, str(outcome)


def test_each_case_has_a_name_of_its_own() -> None:
    assert len({case.id for case in cases()}) == len(cases())
    assert len({case.id for case in interpreted()}) == len(interpreted())


def test_the_interpreters_slice_has_every_suite_mode_and_dtype() -> None:
    assert {case.suite for case in interpreted()} == set(SUITES)
    for facets in (
        {(case.suite, case.mode) for case in cases()} - {(case.suite, case.mode) for case in interpreted()},
        {(case.x, case.y, case.weight) for case in cases()} - {(case.x, case.y, case.weight) for case in interpreted()},
        {case.inputs for case in cases()} - {case.inputs for case in interpreted()},
    ):
        assert facets == set()


def test_the_table_has_every_combination_of_the_suites_lists() -> None:
    """The lists' lengths as their suites state them, multiplied; edges and our own cases come on top."""
    norms, floats = 2, 3
    least = {
        "ck_tile": 26 * 5 * 2 * 3 * 2 * norms + norms,
        "vllm": (3 * 6 * 2 * 2 * floats + 19 * 2 * 2 * 2) * norms,
        # M × N × dtypes, with and without a bias for LayerNorm, each forward and backward.
        "quack": 4 * 13 * floats * (2 + 1) * 2 + 2 * 16,
        "flash_attention": 5 * 5 * 3 * norms,
        "liger": 8 * floats * norms,
        "flashinfer": 4 * 8 * 2 * 3 * 2 + 4 * 4,
        "triton": 1,
        "normforge": 700,
    }
    counts = Counter(case.suite for case in cases())
    assert set(counts) == set(least)
    assert [suite for suite, count in least.items() if counts[suite] < count] == []
