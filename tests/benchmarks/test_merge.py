"""Folders of one run are joined, or refused, and never lose a figure silently."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cli
from benchmarks.suites import SUITES

from .small import loaded, results

CELLS = SUITES["forward"].cells[:4]
FEW = SUITES["decode"].cells[:1]
_FIGURES = (("quack", 0.0), ("eager", 3.0), ("normforge", 2.0), ("copy", 1.0))


@pytest.fixture
def halves(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of one run; the second also has a suite of its own."""
    one, two = tmp_path / "one", tmp_path / "two"
    results("forward", *((cell, name, us) for cell in CELLS[1::2] for name, us in _FIGURES)).save(one)
    results("forward", *((cell, name, us) for cell in CELLS[::2] for name, us in _FIGURES)).save(two)
    results("decode", (FEW[0], "normforge", 2.0)).save(two)
    return one, two


def _merge(*folders: Path, out: Path) -> int:
    return cli.main(["merge", *map(str, folders), "--out", str(out)])


def test_a_merge_is_what_one_process_would_have_written(halves: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _merge(*halves, out=out) == 0
    whole = results("forward", *((cell, name, us) for cell in CELLS for name, us in _FIGURES))
    whole.save(tmp_path / "whole")
    assert (out / "forward.csv").read_text() == (tmp_path / "whole" / "forward.csv").read_text()
    assert loaded(out, "decode") == loaded(halves[1], "decode")
    assert (out / "forward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("change", [{"revision": "another"}, {"rows": "no more than 8"}, {"seed": "8"}])
def test_results_of_two_runs_are_refused(
    change: dict[str, str], halves: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = loaded(halves[1], "forward")
    other.header |= change
    other.save(halves[1])
    assert _merge(*halves, out=tmp_path / "out") == cli.USAGE
    assert f"the header of {halves[1] / 'forward.csv'} differs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("folders", "out", "said"),
    [
        (("one", "two", "three"), "out", f"forward.csv has normforge on {CELLS[1].id}"),
        (("one", "two", "nowhere"), "out", "no results are in"),
        (("one", "two"), "one", "holds forward.csv; name another folder"),
    ],
    ids=["a figure that is there twice", "a folder without results", "a folder that has the suite"],
)
def test_what_would_lose_a_figure_is_refused(
    folders: tuple[str, ...], out: str, said: str, halves: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results("forward", (CELLS[1], "normforge", 2.0)).save(tmp_path / "three")
    assert _merge(*(tmp_path / name for name in folders), out=tmp_path / out) == cli.USAGE
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert len(loaded(tmp_path / "one", "forward").rows) == 8
