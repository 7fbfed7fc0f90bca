"""What batch invariance costs: which cells say it, by which two providers, and what `reach` makes of them."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

import normforge
from benchmarks.cells import Cell, Norm, Task
from benchmarks.inputs import make_inputs
from benchmarks.oracle import check as hold
from benchmarks.oracle import expect
from benchmarks.providers import every_provider
from benchmarks.reach import RULES, Rule, check, describe
from benchmarks.suites import SUITES
from benchmarks.suites.batch_invariant import PROVIDER

from .small import results

FEW, MANY = SUITES["batch-invariant"].cells, SUITES["batch-invariant-many"].cells
TASKS = {Task.FORWARD, Task.ADD, Task.QUANT, Task.ADD_QUANT, Task.BACKWARD}
COSTS = [rule for rule in RULES if rule.provider == PROVIDER]


def test_every_kind_of_kernel_is_timed_on_both_sides_of_256_rows_by_both() -> None:
    kinds = {(task, norm) for task in TASKS for norm in Norm}
    assert {(cell.task, cell.norm) for cell in FEW} == kinds == {(cell.task, cell.norm) for cell in MANY}
    assert max(cell.m for cell in FEW) == 256
    assert min(cell.m for cell in MANY) == 257
    everyone = every_provider()
    assert all(everyone[name].builder(cell) for cell in (*FEW, *MANY) for name in ("normforge", PROVIDER))
    assert not everyone[PROVIDER].builder(Cell(Task.FORWARD, Norm.LAYER, 257, 64, group="elsewhere"))


def test_calls_are_invariant_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = next(replace(cell, m=2, n=96) for cell in MANY if cell.task is Task.ADD_QUANT)
    inputs, entered = make_inputs(cell, torch.device("cpu")), Mock(wraps=normforge.batch_invariant)
    build = every_provider()[PROVIDER].builder(cell)
    assert build is not None
    prepared = build(inputs)
    monkeypatch.setattr(normforge, "batch_invariant", entered)
    hold(prepared.outputs(prepared.call()), expect(inputs), inputs)
    entered.assert_called()


@pytest.mark.parametrize("rule", COSTS, ids=lambda rule: rule.title)
def test_more_than_3_percent_in_one_cell_is_too_much(rule: Rule) -> None:
    cells = [cell for cell in MANY if cell.group == rule.group]

    def judged(cost: float, *, least: int = 0) -> str:
        times = [(cells[0], PROVIDER, 10 * cost), *((cell, PROVIDER, 9.0) for cell in cells[1:])]
        times += [(cell, "normforge", 10.0) for cell in cells[least:]]
        # Others are no concern of it.
        times += [(cells[1], "eager", 1.0), (cells[1], "copy", 1.0)]
        checked = check(rule, results(rule.suite, *times))
        assert len(checked.findings) == len(cells)
        return checked.outcome

    assert judged(1.029) == "reached"
    assert judged(1.031) == "short"
    assert judged(0.0) == "short"
    assert judged(1.0, least=1) == "short"


def test_all_tasks_are_judged_and_none_by_a_part_of_its_cells() -> None:
    assert {rule.group for rule in COSTS} == {cell.group for cell in MANY}
    rule = COSTS[0]
    cells = [cell for cell in MANY if cell.group == rule.group][1:]
    part = check(rule, results(rule.suite, *((cell, name, 1.0) for cell in cells for name in (PROVIDER, "normforge"))))
    assert not part.met
    assert f"fewer than {len(cells) + 1} cells measured" in describe([part], every=False)
