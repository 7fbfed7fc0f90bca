"""Folders of one run are joined, or refused, and never lose a figure silently."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cli
from benchmarks.results import Results, load
from benchmarks.runner import running
from benchmarks.suites import SUITES

from .small import results

CELLS = SUITES["forward"].cells[:4]
FEW = SUITES["decode"].cells[:1]


@pytest.fixture
def halves(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of one run; the second also has a suite of its own."""
    one, two = tmp_path / "one", tmp_path / "two"
    results("forward", *((cell, name, us) for cell in CELLS[1::2] for name, us in _FIGURES)).save(one)
    results("forward", *((cell, name, us) for cell in CELLS[::2] for name, us in _FIGURES)).save(two)
    results("decode", (FEW[0], "normforge", 2.0)).save(two)
    return one, two


_FIGURES = (("quack", 0.0), ("eager", 3.0), ("normforge", 2.0), ("copy", 1.0))


def _merge(*folders: Path, out: Path, options: tuple[str, ...] = ()) -> int:
    return cli.main(["merge", *map(str, folders), "--out", str(out), *options])


def _loaded(folder: Path, suite: str) -> Results:
    found = load(folder, suite)
    assert found is not None
    return found


def test_a_merge_is_what_one_process_would_have_written(halves: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _merge(*halves, out=out) == 0
    whole = results("forward", *((cell, name, us) for cell in CELLS for name, us in _FIGURES))
    whole.save(tmp_path / "whole")
    assert (out / "forward.csv").read_text() == (tmp_path / "whole" / "forward.csv").read_text()
    assert _loaded(out, "decode") == _loaded(halves[1], "decode")
    assert (out / "forward.png").read_bytes().startswith(b"\x89PNG")


def test_providers_of_a_cell_may_come_from_two_folders(tmp_path: Path) -> None:
    one, two, out = (tmp_path / name for name in ("one", "two", "out"))
    results("forward", (CELLS[0], "eager", 3.0), (CELLS[1], "eager", 3.0)).save(one)
    results("forward", (CELLS[0], "normforge", 2.0)).save(two)
    assert _merge(one, two, out=out) == 0
    assert list(_loaded(out, "forward").rows) == [
        (CELLS[0].id, "eager"),
        (CELLS[0].id, "normforge"),
        (CELLS[1].id, "eager"),
    ]


@pytest.mark.parametrize("suite", ["forward", "decode"])
def test_results_of_two_runs_are_refused(
    suite: str, halves: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _loaded(halves[1], suite)
    other.header["revision"] = "another"
    other.save(halves[1])
    assert _merge(*halves, out=tmp_path / "out") == cli.USAGE
    error = capsys.readouterr().err
    assert f"revision is none in {halves[0] / 'forward.csv'}" in error
    assert f"another in {halves[1] / suite}.csv" in error
    assert "measure it again" in error
    assert not (tmp_path / "out").exists()


def test_a_key_that_one_header_lacks_is_a_difference(
    halves: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _loaded(halves[1], "forward")
    other.header["rows"] = "no more than 8"
    other.save(halves[1])
    assert _merge(*halves, out=tmp_path / "out") == cli.USAGE
    assert "rows is missing in" in capsys.readouterr().err


def test_a_figure_that_is_there_twice_is_refused(
    halves: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = _loaded(halves[0], "forward")
    twice.rows = {key: row for key, row in twice.rows.items() if key == (CELLS[1].id, "normforge")}
    twice.save(tmp_path / "three")
    assert _merge(*halves, tmp_path / "three", out=tmp_path / "out") == cli.USAGE
    error = capsys.readouterr().err
    assert f"normforge was measured on {CELLS[1].id} in both {halves[0]}" in error
    assert str(tmp_path / "three" / "forward.csv") in error
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_taken_only_when_asked(
    halves: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    results("quant", (SUITES["quant"].cells[0], "normforge", 9.0)).save(out)
    assert _merge(*halves, out=out) == cli.USAGE
    assert "is not empty (notes.txt and 1 more); pass --fresh" in capsys.readouterr().err
    assert load(out, "forward") is None
    assert _merge(*halves, out=out, options=("--fresh",)) == 0
    assert len(_loaded(out, "forward").rows) == 16
    assert load(out, "quant") is None
    assert (out / "notes.txt").read_text() == "mine"
    assert _merge(*halves, out=halves[0], options=("--fresh",)) == cli.USAGE
    assert "is one of the folders to merge" in capsys.readouterr().err
    assert len(_loaded(halves[0], "forward").rows) == 8


def test_a_folder_without_results_is_an_error(
    halves: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _merge(*halves, tmp_path / "nowhere", out=tmp_path / "out") == cli.USAGE
    assert f"no results are in {tmp_path / 'nowhere'}" in capsys.readouterr().err


def test_what_is_unfinished_or_left_behind_is_said(
    halves: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running(halves[0], "forward").write_text(f"{CELLS[1].id}\nquack\n")
    (halves[1] / "startup.csv").write_text("way\n")
    assert _merge(*halves, out=tmp_path / "out") == 0
    error = capsys.readouterr().err
    assert f"{halves[0] / 'forward.running'} says that a run goes on there, or was killed" in error
    assert f"{halves[1] / 'startup.csv'} belongs to no suite" in error
