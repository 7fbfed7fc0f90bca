"""What `reach` makes of cells beside plain norms: a goal is met by a little, and missed by a little."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.cells import Cell
from benchmarks.reach import RULES, Rule, check
from benchmarks.results import make_row
from benchmarks.suites import SUITES
from benchmarks.suites.batch_invariant import PROVIDER

from .small import results

RULE = {rule.title: rule for rule in RULES}
COSTS = [rule for rule in RULES if rule.peers == ("normforge",)]


def _covered(rule: Rule) -> list[Cell]:
    return [cell for cell in SUITES[rule.suite].cells if rule.covers(make_row(cell, rule.provider, "ok"))]


def _met(rule: Rule, to_copy: float, to_peer: float = 2.0) -> bool:
    """Whether it is where one cell has these ratios, and all others are as fast as may be."""
    made: list[tuple[Cell, str, float]] = []
    for position, cell in enumerate(_covered(rule)):
        copy, peer = (to_copy, to_peer) if position == 0 else (9.0, 9.0)
        own = 100.0
        made += [
            (cell, "normforge", own),
            (cell, "eager", own * peer),
            (cell, "compile", own * peer * 2),
            (cell, "copy", own * copy * cell.copy_bytes / cell.bytes_moved),
        ]
    return check(rule, results(rule.suite, *made)).met


@pytest.mark.parametrize(
    ("title", "copy", "cells"),
    [
        ("fp8 in, bf16 out", 0.90, {("scaled", n) for n in (1024, 4096, 8192, 16384)}),
        ("modulated", 0.90, {(task, n) for task in ("modulated",) for n in (1152, 3072, 4096)}),
        ("modulated, backward", 0.80, {("modulated_backward", n) for n in (1152, 3072, 4096)}),
        ("gated, 262144×128", 0.90, {("gated", 128)}),
        ("gated, 262144×128, backward", 0.90, {("gated_backward", 128)}),
        ("odd rows 1000, 4099, 5137", 0.90, {("forward", n) for n in (1000, 4099, 5137)}),
        (
            "backward, N from 12288",
            0.85,
            {("backward", n) for n in (12288, 16384, 32768, 65536, 131072, 262144)},
        ),
    ],
)
def test_a_share_of_the_copys_speed(title: str, copy: float, cells: set[tuple[str, int]]) -> None:
    rule = RULE[title]
    assert {(cell.task.value, cell.n) for cell in _covered(rule)} == cells
    assert _met(rule, copy + 0.001)
    assert not _met(rule, copy - 0.001)


@pytest.mark.parametrize("layout", ["", ", channels last"])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_group_norm_is_ahead_of_every_peer_in_every_cell_of_both_layouts(part: str, layout: str) -> None:
    rule = RULE[f"GroupNorm, {part}{layout}"]
    assert {cell.dtype for cell in _covered(rule)} == {"bf16", "fp16", "fp32"}
    assert _met(rule, 0.801, 1.001)
    assert not _met(rule, 0.799, 1.001)
    assert not _met(rule, 0.801, 0.999)


@pytest.mark.parametrize("rule", COSTS, ids=lambda rule: rule.title)
def test_a_cost_is_held_to_our_own_time_without_it_in_every_cell(rule: Rule) -> None:
    """Batch invariance may cost 3 %, a dropout and scales of groups 5 %."""
    most = 1.03 if rule.provider == PROVIDER else 1.05
    cells = {cell.id: cell for cell in SUITES[rule.suite].cells}
    covered = _covered(rule)
    without = [cells[rule.other_cell(make_row(cell, rule.provider, "ok"))] for cell in covered]

    def judged(cost: float, *, least: int = 0) -> bool:
        figures = [(covered[0], rule.provider, 10 * cost), *((cell, rule.provider, 9.0) for cell in covered[1:])]
        figures += [(cell, "normforge", 10.0) for cell in without[least:]]
        # What others take is nothing to it.
        figures += [(cell, name, 1.0) for cell in without[:2] for name in ("eager", "copy")]
        checked = check(rule, results(rule.suite, *figures))
        assert len(checked.findings) == len(covered)
        return checked.met

    assert judged(most - 0.001)
    assert not judged(most + 0.001)
    assert not judged(0.0)
    assert not judged(1.0, least=1)


def test_every_task_is_judged_under_batch_invariance_and_none_by_a_part_of_its_cells() -> None:
    least = {rule.group: rule.least_cells for rule in COSTS if rule.provider == PROVIDER}
    assert least == Counter(cell.group for cell in SUITES["batch-invariant-many"].cells)


@pytest.mark.parametrize(
    ("title", "most"), [("host, forward and backward, torch", 100.0), ("host, module under no_grad, torch", 95.0)]
)
def test_calls_on_the_host_are_held_to_torchs(title: str, most: float) -> None:
    rule = RULE[title]
    (cell,) = _covered(rule)
    for us, met in ((most - 0.1, True), (most + 0.1, False)):
        found = results("host", (cell, "normforge", us), (cell, "eager", 100.0), (cell, "quack", 50.0))
        assert check(rule, found).met is met
