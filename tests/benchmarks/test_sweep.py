"""The suite whose cells are drawn: what a draw covers, what a seed decides, goals, table and picture of its results."""

from __future__ import annotations

import math
import time
from collections import Counter
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import cli, run
from benchmarks.cells import DTYPES, Cell, Norm, Task
from benchmarks.reach import RULES, Checked, check, describe
from benchmarks.results import Results
from benchmarks.runner import running
from benchmarks.suites import SUITES, sweep
from benchmarks.suites.sweep import GROUPS, MOST_SOME, lengths

from ..thorough import THOROUGH
from .small import HEADER, loaded, plan, provider, results, torch_norm

SEEDS = (0, 1, -1, 2**70)
TURN = 168
draw = cache(sweep.draw)
RULE = {rule.title: rule for rule in RULES if rule.suite == "sweep"}


@pytest.mark.parametrize("seed", SEEDS)
def test_lengths_are_spread_evenly_from_32_to_131072(seed: int) -> None:
    drawn = lengths(seed)
    aligned = [n for n in drawn if n % 8 == 0]
    assert len(set(drawn)) == len(drawn) == TURN
    assert len(aligned) >= 150
    assert (drawn[0], drawn[-1]) == (32, 131072)
    # Beyond 256, where multiples of 8 are dense enough, 14 an octave.
    assert {sum(low <= n < 2 * low for n in aligned) for low in (256 * 2**octave for octave in range(9))} == {14}
    assert set(range(32, 160, 8)) <= set(aligned)
    assert max(after / before for before, after in pairwise(aligned)) <= 1.25
    odd = [n for n in drawn if n % 2]
    others = [n for n in drawn if n % 8 and n % 2 == 0]
    assert len(odd) == len(others) == 8
    assert min(odd) < 512
    assert max(odd) > 32768


@pytest.mark.parametrize("seed", SEEDS)
def test_every_length_has_every_size_and_every_computation_once(seed: int) -> None:
    cells, drawn = draw(seed), lengths(seed)
    wanted = [(task, norm) for task in (Task.FORWARD, Task.ADD, Task.ADD_QUANT, Task.BACKWARD) for norm in Norm]
    eight, ninth = cells[: 8 * TURN], cells[8 * TURN :]
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
    # A ninth turn is the first, of fp16 and fp32.
    assert {cell.dtype for cell in eight} == {"bf16"}
    assert [(cell.n, cell.group, *_computed(cell)) for cell in ninth] == [
        (cell.n, cell.group, *_computed(cell)) for cell in cells[:TURN]
    ]
    assert Counter(cell.dtype for cell in ninth) == {"fp16": TURN // 2, "fp32": TURN // 2}
    pairs = {(cell.dtype, *_computed(cell)) for cell in ninth}, {(cell.dtype, cell.group) for cell in ninth}
    assert [len(each) for each in pairs] == [2 * 8, 2 * len(GROUPS)]


def test_a_class_of_rows_is_a_size_or_a_number() -> None:
    for cell in draw(5):
        what, _, number = cell.group.partition(" = ")
        if number:
            assert (what, cell.m) == ("M", int(number))
        else:
            size = int(what.removesuffix(" MiB")) * 2**20
            # Down to a multiple of 8 rows.
            row = cell.n * DTYPES[cell.dtype].itemsize
            assert size - 8 * row < cell.m * row <= size
    assert {cell.m for cell in draw(5) if cell.group.startswith("M")} == {64, 256, 512, 1024, 2048}


def test_a_seed_decides_the_cells() -> None:
    assert draw(3) == sweep.draw(3)
    ids = {seed: {cell.id for cell in draw(seed)} for seed in SEEDS}
    assert len({frozenset(one) for one in ids.values()}) == len(SEEDS)
    assert SUITES["sweep"].cells == draw(0)
    assert SUITES["sweep"].of_seed(0) is SUITES["sweep"]
    assert SUITES["sweep"].of_seed(3).cells == draw(3)
    assert SUITES["forward"].of_seed(3) is SUITES["forward"]


def test_results_name_their_seed_so_it_means_the_same_cells_for_good() -> None:
    """On any Python: one that draws others would go on with a file of other cells, and say nothing."""
    ids = "\n".join(cell.id for cell in draw(0)[: 8 * TURN])
    assert sha256(ids.encode()).hexdigest() == DIGEST


DIGEST = "0a583690ef39f0080ac8023fa989f15b790f15c9bc78168f8d86075485af205e"


def _computed(cell: Cell) -> tuple[Task, Norm]:
    assert cell.out_dtype == ("fp8" if cell.task is Task.ADD_QUANT else "")
    return cell.task, cell.norm


# Of each kind of rows, a few cells.
MANY = [cell for cell in draw(0) if cell.m > MOST_SOME and cell.task is not Task.BACKWARD][:100]
MANY_BACKWARD = [cell for cell in draw(0) if cell.m > MOST_SOME and cell.task is Task.BACKWARD][:90]
SOME = [cell for cell in draw(0) if cell.m <= MOST_SOME and cell.task is not Task.BACKWARD][:100]
SOME_BACKWARD = [cell for cell in draw(0) if cell.m <= MOST_SOME and cell.task is Task.BACKWARD][:90]


def _judged(title: str, cells: list[Cell], shares: list[float], leads: list[float]) -> Checked:
    """A goal's outcome where the copy runs at 1 GB/s, and this project at a share of it that a peer's time leads."""
    figures = []
    for cell, share, lead in zip(cells, shares, leads, strict=True):
        own = cell.bytes_moved / 1e3 / share
        figures += [(cell, "copy", cell.copy_bytes / 1e3), (cell, "normforge", own), (cell, "quack", own * lead)]
    return check(RULE[f"sweep {title}"], results("sweep", *figures))


@pytest.mark.parametrize(
    ("title", "cells", "ratio", "misses"),
    [
        ("forward, many rows, copy", MANY, "share", 5),
        ("forward, many rows, best peer", MANY, "lead", 5),
        ("forward, many rows, best peer in every cell", MANY, "lead", 0),
        ("forward, some rows, best peer", SOME, "lead", 5),
        ("backward, some rows, best peer", SOME_BACKWARD, "lead", 4),
        ("backward, many rows, copy", MANY_BACKWARD, "share", 4),
    ],
)
def test_a_goal_is_missed_by_one_cell(title: str, cells: list[Cell], ratio: str, misses: int) -> None:
    least = {"share": {"f": 0.92, "b": 0.85}[title[0]], "lead": 0.95 if "every" in title else 1.0}[ratio]
    plenty = [1.5] * len(cells)
    for count, met in ((misses, True), (misses + 1, False)):
        ratios = [least - 0.001] * count + [least + 0.001] * (len(cells) - count)
        given = {"share": (ratios, plenty), "lead": (plenty, ratios)}[ratio]
        checked = _judged(title, cells, *given)
        assert len(checked.findings) == len(cells)
        assert checked.met is met


def test_a_mean_is_geometric_and_of_every_cell() -> None:
    title, count = "backward, many rows, best peer in the mean", len(MANY_BACKWARD)
    plenty, half = [1.0] * count, count // 2
    # √(0.6 · 2.41) is above 1.2, and √(0.6 · 2.39) is not, though their arithmetic means are 1.5.
    assert _judged(title, MANY_BACKWARD, plenty, [0.6, 2.41] * half).met
    short = _judged(title, MANY_BACKWARD, plenty, [0.6, 2.39] * half)
    assert short.mean_to_peer == pytest.approx(math.sqrt(0.6 * 2.39))
    assert not short.met
    assert "1.197 (≥ 1.2) in the mean" in describe([short], every=False)


def test_a_cell_without_a_figure_is_missed() -> None:
    rule = RULE["sweep backward, many rows, best peer in the mean"]
    figures = [(cell, name, us) for cell in MANY_BACKWARD for name, us in (("normforge", 1.0), ("quack", 2.0))]
    assert check(rule, results("sweep", *figures)).met
    assert not check(rule, results("sweep", *figures[:-2], (*figures[-2][:2], 0.0), figures[-1])).met
    assert not check(rule, results("sweep", *figures[:-1])).met


def test_a_few_cells_reach_nothing() -> None:
    few = _judged("forward, many rows, copy", MANY[:39], [1.0] * 39, [1.0] * 39)
    assert not few.met
    assert "fewer than 40 cells measured" in describe([few], every=False)
    assert _judged("forward, many rows, copy", MANY[:40], [1.0] * 40, [1.0] * 40).met


def _made(seed: int, cells: tuple[Cell, ...]) -> Results:
    peers = (("copy", 1.0), ("quack", 3.0), ("compile", 2.5), ("normforge", 2.0))
    made = results("sweep", *((cell, name, us) for cell in cells for name, us in peers))
    made.header["seed"] = str(seed)
    return made


def test_a_seed_is_chosen_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--suite", "sweep", "--seed", "9"]) == 0
    listed = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [line for line in listed if "/" in line and "(" not in line] == [cell.id for cell in draw(9)]


@THOROUGH
def test_a_run_says_its_seed_and_goes_on_with_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = [cell for cell in draw(9) if cell.n == 32 and cell.task is Task.FORWARD]
    command = ["run", "--suite", "sweep", "--rows", "4", "--providers", "eager", "copy", "--only", "forward/*/4x32"]
    command += ["--out", str(tmp_path), "--revision", "r1"]
    assert cli.main([*command, "--seed", "9"]) == 0
    found = loaded(tmp_path, "sweep")
    assert found.header["seed"] == "9"
    assert len(found.rows) == 2 * len(short)
    assert cli.main([*command, "--seed", "9"]) == 0
    capsys.readouterr()
    assert cli.main(command) == cli.USAGE
    assert "(seed 9 there, 0 now); pass --fresh" in capsys.readouterr().err


@THOROUGH
def test_folders_of_one_seed_are_merged(tmp_path: Path) -> None:
    cells = draw(9)
    _made(9, cells[1:3]).save(tmp_path / "one")
    _made(9, cells[:1]).save(tmp_path / "two")
    one, two, out = (str(tmp_path / name) for name in ("one", "two", "all"))
    assert cli.main(["merge", one, two, "--out", out]) == 0
    merged = loaded(Path(out), "sweep")
    assert merged.header["seed"] == "9"
    assert list(merged.cells()) == [cell.id for cell in cells[:3]]


def test_under_a_deadline_no_more_is_compiled_ahead_than_may_be_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run of ten minutes would compile for an hour, and time nothing."""
    ahead: list[int] = []
    monkeypatch.setattr(run, "compile_ahead", lambda work, *_: ahead.append(len(work)))
    monkeypatch.setattr(run, "run_suite", lambda suite, cells, *_: len(cells))
    cells, peer = draw(0), provider("peer", torch_norm)
    suite, nothing = SUITES["sweep"], Results("sweep", dict(HEADER))
    offered = [cell for cell in cells if peer.builder(cell)]
    soon = plan(tmp_path, peer, deadline=time.monotonic() + 1000)
    assert run._run_in_stages(suite, cells, nothing, soon, jobs=2) == len(cells)
    assert len(ahead) == 9
    assert sum(ahead) == len(offered)
    ahead.clear()
    late = plan(tmp_path, peer, deadline=time.monotonic() - 1)
    assert run._run_in_stages(suite, cells, nothing, late, jobs=2) == len(cells)
    assert not ahead


def test_what_a_process_died_of_in_a_later_stage_is_recorded(tmp_path: Path) -> None:
    cells = draw(0)
    peer = provider("peer", torch_norm)
    culprit = next(cell for cell in cells[2 * TURN :] if peer.builder(cell))
    running(tmp_path, "sweep").write_text(f"{culprit.id}\npeer\n")
    found = Results("sweep", dict(HEADER))
    late = plan(tmp_path, peer, deadline=time.monotonic() - 1)
    run._run_in_stages(SUITES["sweep"], cells, found, late, jobs=0)
    assert list(found.rows) == [(culprit.id, "peer")]
    assert not running(tmp_path, "sweep").exists()
