"""Two runs beside each other: what moved by more than the noise is named, and nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.beside import compare, moved
from benchmarks.cells import Cell, Norm, Task

from .small import results

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
