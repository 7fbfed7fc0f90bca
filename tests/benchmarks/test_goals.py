"""Results: goals that are met and missed by a little, two runs beside each other, and folders that are committed."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.beside import compare, moved
from benchmarks.cells import Cell, Norm, Task
from benchmarks.chosen import RESULTS
from benchmarks.providers import every_provider
from benchmarks.reach import RULES, Checked, Rule, check, describe
from benchmarks.results import make_row
from benchmarks.suites import SUITES
from proving.evidence import TABLES

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


CELLS = tuple(Cell(Task.FORWARD, Norm.LAYER, 4096, n, group="256 MiB") for n in (1024, 2048, 4096, 8192))


def _save(folder: Path, *, slower: float = 1.0, ours: float = 50.0, noise: float = 0.0, revision: str = "r1") -> Path:
    """Results of a machine that is so many times slower, where this project took `ours` on the last cell."""
    times = [(cell, name, us) for cell in CELLS for name, us in (("copy", 40.0), ("eager", 90.0), ("normforge", 50.0))]
    times[-1] = (CELLS[-1], "normforge", ours)
    found = results("forward", *((cell, name, us * slower) for cell, name, us in times))
    for row in list(found.rows.values()):
        found.add(dataclasses.replace(row, us_p80=row.us * (1 + noise)))
    found.header["revision"] = revision
    found.save(folder)
    return folder


def test_a_slower_machine_moves_nothing(tmp_path: Path) -> None:
    (one,) = compare(_save(tmp_path / "old"), _save(tmp_path / "new", slower=1.5))
    assert one.drift == pytest.approx(0.5)
    assert moved(one, 0.001) == []


def test_what_moved_either_way_is_named_and_what_is_noise_is_not(tmp_path: Path) -> None:
    old = _save(tmp_path / "old")
    for ours in (48.0, 52.0):
        (one,) = compare(old, _save(tmp_path / "new", ours=ours))
        (change,) = moved(one, 0.03)
        assert change.name == (CELLS[-1].id, "256 MiB", "normforge")
        assert change.relative == pytest.approx(ours / 50 - 1)
        assert moved(one, 0.05) == []
        # Half of 10 % of one run.
        (one,) = compare(old, _save(tmp_path / "new", ours=ours, noise=0.1))
        assert moved(one, 0.03) == []


def test_a_change_of_all_of_ours_is_no_drift_of_the_machine(tmp_path: Path) -> None:
    for name, us in (("old", 10.0), ("new", 11.0)):
        ours = [(cell, "normforge", us) for cell in CELLS]
        results("host", (CELLS[0], "eager", 20.0), *ours).save(tmp_path / name)
    (one,) = compare(tmp_path / "old", tmp_path / "new")
    assert one.drift == 0
    assert [change.relative for change in moved(one, 0.03)] == [pytest.approx(0.1)] * len(CELLS)


@pytest.mark.parametrize("broken", ["old", "new"])
def test_a_failure_of_one_run_is_beyond_any_noise_and_of_both_is_none(broken: str, tmp_path: Path) -> None:
    for name in ("old", "new"):
        _save(tmp_path / name, ours=0.0 if name == broken else 50.0)
    (one,) = compare(tmp_path / "old", tmp_path / "new")
    assert [change.name[-1] for change in moved(one, 1000.0)] == ["normforge"]
    (same,) = compare(tmp_path / broken, tmp_path / broken)
    assert moved(same, 0.0) == []


ROOT = RESULTS.parent.parent
EVIDENCE = ROOT / TABLES
# A command of its own writes each table of evidence, at a revision of its own.
FOLDERS = sorted(path for path in RESULTS.iterdir() if path.is_dir() and path != EVIDENCE)
# All results together. This number only falls: an older run goes when a newer one of its kind and card comes.
MOST_BYTES = 3_000_000
# What two tables of one run may differ in: what only some of them used, or were given.
OWN = {"shape", "beside", "seed", "rows", "jax", "transformers", "timm"}


def headers(folder: Path) -> Iterator[dict[str, str]]:
    """Yield what the header of each table, or file of text, of a folder states."""
    for path in (*folder.glob("*.csv"), *folder.glob("*.txt")):
        head = r"^# (\S.*?): (.+)$" if path.suffix == ".csv" else r"^(\w[\w-]*): (.+)$"
        yield dict(re.findall(head, path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_folder_is_of_one_revision_and_one_machine(folder: Path) -> None:
    found = list(headers(folder))
    for key in {key for header in found for key in header} - OWN:
        assert len({header[key] for header in found if key in header}) == 1, key
    assert {path.suffix for path in folder.iterdir()} <= {".csv", ".txt", ".png"}


def test_every_table_states_its_revision() -> None:
    assert [path for path in RESULTS.iterdir() if not path.is_dir()] == []
    revisions = [header.get("revision", "") for folder in (*FOLDERS, EVIDENCE) for header in headers(folder)]
    assert revisions
    assert [revision for revision in revisions if not re.fullmatch(r"[0-9a-f]{7,40}", revision)] == []


def test_the_results_fit_into_their_budget() -> None:
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) <= MOST_BYTES


def test_every_picture_is_on_a_page() -> None:
    """Every other picture is a command away, `python -m benchmarks report --pictures`, and need not be kept."""
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    pictures = [path.relative_to(ROOT).as_posix() for path in RESULTS.rglob("*.png")]
    assert pictures
    assert [picture for picture in pictures if picture not in pages] == []
