"""The suite whose cells are drawn: what a draw covers, and what a seed decides."""

from __future__ import annotations

from collections import Counter
from functools import cache
from hashlib import sha256

import pytest

from benchmarks.cells import Cell, Norm, Task
from benchmarks.suites import SUITES, sweep
from benchmarks.suites.sweep import GROUPS, lengths

SEEDS = (0, 2**70)
TURN = 168
draw = cache(sweep.draw)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_length_has_every_size_and_every_computation_once(seed: int) -> None:
    cells, drawn = draw(seed), lengths(seed)
    wanted = [(task, norm) for task in (Task.FORWARD, Task.ADD, Task.ADD_QUANT, Task.BACKWARD) for norm in Norm]
    eight = cells[: 8 * TURN]
    assert len({cell.id for cell in eight}) == len(eight)
    assert {(cell.n, *_computed(cell)) for cell in eight} == {(n, *one) for n in drawn for one in wanted}
    assert {(cell.n, cell.group) for cell in eight} == {(n, group) for n in drawn for group in GROUPS}
    # Each pair of the two as often, and once in any half an octave or so.
    for start in range(0, TURN, 8):
        block = [cell for cell in eight if cell.n in drawn[start : start + 8]]
        assert Counter((cell.group, *_computed(cell)) for cell in block) == {
            (group, *one): 1 for group in GROUPS for one in wanted
        }
    # A run that is cut has a sample of the whole; however short, of lengths from all over.
    for start in range(0, len(cells), TURN):
        turn = cells[start : start + TURN]
        assert sorted(cell.n for cell in turn) == drawn
        assert set(Counter(_computed(cell) for cell in turn).values()) == {TURN // 8}
        assert set(Counter(cell.group for cell in turn).values()) == {TURN // 8}
    assert sorted(drawn.index(cell.n) // 8 for cell in cells[:21]) == list(range(21))


def test_a_seed_decides_the_cells() -> None:
    assert len({draw(seed) for seed in SEEDS}) == len(SEEDS)
    assert SUITES["sweep"].cells == draw(0)
    assert SUITES["sweep"].of_seed(3).cells == sweep.draw(3)
    assert SUITES["forward"].of_seed(3) is SUITES["forward"]


def test_results_name_their_seed_so_it_means_the_same_cells_for_good() -> None:
    """On any Python: one that draws others would go on with a file of other cells, and say nothing."""
    ids = "\n".join(cell.id for cell in draw(0)[: 8 * TURN])
    assert sha256(ids.encode()).hexdigest() == DIGEST


DIGEST = "0a583690ef39f0080ac8023fa989f15b790f15c9bc78168f8d86075485af205e"


def _computed(cell: Cell) -> tuple[Task, Norm]:
    assert cell.out_dtype == ("fp8" if cell.task is Task.ADD_QUANT else "")
    return cell.task, cell.norm
