"""Each goal of `reach` is met by a little and missed by a little, in the cells that it is about."""

from __future__ import annotations

import math

import pytest

from benchmarks.cells import Cell
from benchmarks.providers import every_provider
from benchmarks.reach import RULES, Checked, Rule, check, describe
from benchmarks.results import make_row
from benchmarks.suites import SUITES

from .small import results

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.title)
(MEAN,) = (rule for rule in RULES if rule.mean_peer is not None)
AHEAD = 9.0


def _covered(rule: Rule) -> list[Cell]:
    return [cell for cell in SUITES[rule.suite].cells if rule.covers(make_row(cell, rule.provider, "ok"))]


def _judged(rule: Rule, to_copy: list[float], to_peer: list[float], least: int = 0) -> Checked:
    """Check a goal where its cells, from the `least`-th on, have these ratios to the copy and to the best peer."""
    cells = {cell.id: cell for cell in SUITES[rule.suite].cells}
    peer, figures = rule.peers[-1] if rule.peers else "eager", []
    for cell, of_copy, of_peer in list(zip(_covered(rule), to_copy, to_peer, strict=True))[least:]:
        other = cells[rule.other_cell(make_row(cell, rule.provider, "ok"))]
        figures += [
            (cell, rule.provider, 100.0),
            (cell, "copy", 100 * of_copy * cell.copy_bytes / cell.bytes_moved),
            (other, peer, 100 * of_peer),
        ]
        if rule.peers:
            # What others take is nothing to it.
            figures.append((other, "liger", 1.0))
    return check(rule, results(rule.suite, *figures))


@each_rule
def test_a_goal_is_about_cells_and_peers_that_there_are(rule: Rule) -> None:
    assert _covered(rule)
    assert rule.copy is None or SUITES[rule.suite].has_ceiling
    assert {rule.provider, *rule.peers} <= every_provider().keys()


@each_rule
def test_a_goal_is_met_by_a_little_and_missed_by_a_little(rule: Rule) -> None:
    count = len(_covered(rule))
    plenty = [AHEAD] * count
    assert len(_judged(rule, plenty, plenty).findings) == count
    may_miss = count - math.ceil(rule.share * count)
    for least, given in ((rule.copy, lambda ratios: (ratios, plenty)), (rule.peer, lambda ratios: (plenty, ratios))):
        if least is None:
            continue
        for misses, met in ((may_miss, True), (may_miss + 1, False)):
            ratios = [least * 0.999] * misses + [least * 1.001] * (count - misses)
            assert _judged(rule, *given(ratios)).met is met


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.least_cells > 1], ids=lambda rule: rule.title)
def test_a_few_cells_reach_nothing(rule: Rule) -> None:
    plenty = [AHEAD] * len(_covered(rule))
    enough = len(plenty) - rule.least_cells
    assert _judged(rule, plenty, plenty, enough).met
    few = _judged(rule, plenty, plenty, enough + 1)
    assert not few.met
    assert f"fewer than {rule.least_cells} cells measured" in describe([few], every=False)


def test_a_mean_is_geometric() -> None:
    half = len(_covered(MEAN)) // 2
    plenty = [AHEAD] * 2 * half
    # √(0.6 · 2.41) is above 1.2, and √(0.6 · 2.39) is not, though their arithmetic means are 1.5.
    assert _judged(MEAN, plenty, [0.6, 2.41] * half).met
    short = _judged(MEAN, plenty, [0.6, 2.39] * half)
    assert short.mean_to_peer == pytest.approx(math.sqrt(0.6 * 2.39))
    assert not short.met
    assert "1.197 (≥ 1.2) in the mean" in describe([short], every=False)


def test_a_cell_without_a_figure_is_missed() -> None:
    figures = [(cell, name, us) for cell in _covered(MEAN) for name, us in (("normforge", 1.0), ("quack", 2.0))]
    assert check(MEAN, results("sweep", *figures)).met
    assert not check(MEAN, None).met
    assert not check(MEAN, results("sweep", *figures[:-2], (*figures[-2][:2], 0.0), figures[-1])).met
    assert not check(MEAN, results("sweep", *figures[:-1])).met
