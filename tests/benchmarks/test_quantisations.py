"""Cells of norms quantised as engines have it: what is computed, what moves, and what the oracle refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.cells import Norm, QuantisedCell, Task
from benchmarks.inputs import Inputs, make_inputs
from benchmarks.oracle import WrongOutputError, check, expect
from benchmarks.providers import every_provider
from benchmarks.reach import Rule
from benchmarks.reach import check as hold
from benchmarks.suites import quantised, quantised_decode

from .small import results

# One of each kind that the suites have, of rows that are as short as packed scales of four groups can be.
KINDS = tuple(
    {
        (cell.task, cell.kind): replace(cell, m=5, n=512)
        for cell in (*quantised.SUITE.cells, *quantised_decode.SUITE.cells)
    }.values()
)


def _made(provider: str, inputs: Inputs) -> dict[str, torch.Tensor]:
    builder = every_provider()[provider].builder(inputs.cell)
    assert builder is not None
    prepared = builder(inputs)
    return prepared.outputs(prepared.call())


def test_both_suites_have_the_same_kinds_of_their_rows() -> None:
    shapes = [
        {(cell.task, cell.kind, cell.m // rows, cell.n) for cell in suite.cells if cell.m == rows}
        for suite, every in ((quantised.SUITE, (1024, 4096, 16384)), (quantised_decode.SUITE, (16, 64, 256)))
        for rows in every
    ]
    assert all(one == shapes[0] for one in shapes)
    added = {(norm, n) for task, kind, _, n in shapes[0] if task is Task.ADD_QUANTISED for norm in [kind.split("_")[0]]}
    assert added == {(norm.value, n) for norm in Norm for n in (2048, 4096, 5120, 7168, 8192)}


@pytest.mark.parametrize("cell", KINDS, ids=lambda cell: cell.id)
@pytest.mark.parametrize("provider", ["normforge", "eager"])
def test_what_is_timed_is_what_the_oracle_says(provider: str, cell: QuantisedCell) -> None:
    inputs = make_inputs(cell, torch.device("cpu"))
    outputs, wanted = _made(provider, inputs), expect(inputs)
    assert ("unquantised" in wanted) == cell.unquantised
    assert ("residual_out" in wanted) == cell.task.adds
    check(outputs, wanted, inputs)


def _spoilt(outputs: dict[str, torch.Tensor], name: str, spoil: Any) -> dict[str, torch.Tensor]:
    return outputs | {name: spoil(outputs[name])}


@pytest.mark.parametrize(
    ("options", "name", "spoil", "message"),
    [
        ({"columns": 128}, "y_scale", lambda scale: scale.roll(1, -1), "y_scale is wrong"),
        ({"columns": 128}, "y_scale", lambda scale: scale[:, :2], "y_scale is .5, 2. torch.float32, not .5, 4."),
        ({"columns": 128}, "y_scale", lambda scale: scale.t().contiguous().t(), "the other layout"),
        ({"columns": 128, "column_major": True}, "y_scale", lambda scale: scale.contiguous(), "the other layout"),
        ({"columns": 128, "column_major": True, "packed": True}, "y_scale", lambda scale: scale + 2, "is wrong"),
        ({"columns": 128, "column_major": True, "packed": True}, "y_scale", lambda scale: scale - 1, "is wrong"),
        ({"columns": 128}, "y", lambda y: y.roll(1, -1), "y is wrong"),
        ({"static": True}, "y", lambda y: (y.float() * 1.2).to(y.dtype), "y is wrong"),
        ({"columns": 128, "unquantised": True}, "unquantised", lambda y: y * 1.1, "unquantised is wrong"),
        ({}, "y_scale", lambda scale: scale * 1.1, "y_scale is wrong"),
    ],
)
def test_what_is_wrong_is_refused(options: dict[str, Any], name: str, spoil: Any, message: str) -> None:
    cell = QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 5, 512, **options)
    inputs = make_inputs(cell, torch.device("cpu"))
    outputs = _made("eager", inputs)
    check(outputs, expect(inputs), inputs)
    with pytest.raises(WrongOutputError, match=message):
        check(_spoilt(outputs, name, spoil), expect(inputs), inputs)


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({"columns": 128}, 7 * 512 + 4 * 4),
        ({"columns": 128, "column_major": True, "packed": True}, 7 * 512 + 4),
        ({"columns": 128, "unquantised": True}, 9 * 512 + 4 * 4),
        ({"static": True}, 7 * 512),
        ({}, 7 * 512 + 4),
    ],
)
def test_what_moves_is_whole_tensors_and_the_scales(options: dict[str, Any], moved: int) -> None:
    assert QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 8, 512, **options).bytes_moved == 8 * moved


def test_goals_of_groups_are_held_against_a_scale_a_row() -> None:
    groups, rows = (QuantisedCell(Task.QUANTISED, Norm.RMS, 16, 2048, columns=columns) for columns in (128, 0))
    rule = Rule(
        "", "quantised-decode", "*_g128/*", peer=1 / 1.05, peers=("normforge",), instead=("_g128/", "_row/"), least_m=16
    )
    for us, met in ((10.4, True), (10.6, False)):
        found = hold(rule, results("quantised-decode", (groups, "normforge", us), (rows, "normforge", 10.0)))
        assert [finding.met for finding in found.findings] == [met]
        assert [finding.best_peer for finding in found.findings] == ["normforge"]
    assert not hold(rule, results("quantised-decode", (groups, "normforge", 1.0))).met
    assert not hold(replace(rule, least_m=17), results("quantised-decode", (groups, "normforge", 1.0))).findings
