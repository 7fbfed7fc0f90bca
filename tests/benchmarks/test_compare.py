"""A rerun held against earlier results: only ratios count, and none of them is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cli
from benchmarks.cells import Cell, Norm, Task
from benchmarks.compare import compare, describe, reproduced
from benchmarks.results import Results

from .small import results

SHORT, LONG = (Cell(Task.FORWARD, Norm.LAYER, 32768 * 4096 // n, n, group="256 MiB") for n in (4096, 8192))
CALL = Cell(Task.FORWARD, Norm.LAYER, 16, 4096, group="ln")


def _forward(*, slower: float = 1.0, ours: float = 100.0, quack: float = 110.0) -> Results:
    """Results of a machine that is so many times slower, where this project took `ours` on the longer rows."""
    figures = [(SHORT, "eager", 200.0), (SHORT, "normforge", 100.0), (SHORT, "copy", 90.0)]
    figures += [(LONG, "quack", quack), (LONG, "eager", 150.0), (LONG, "normforge", ours), (LONG, "copy", 90.0)]
    return results("forward", *((cell, name, us * slower) for cell, name, us in figures))


def test_a_slower_machine_with_the_same_ratios_reproduces_them() -> None:
    one = compare(_forward(), _forward(slower=1.5))
    assert reproduced([one], 0.001)
    assert {(change.cell, change.ratio) for change in one.changes} == {
        (cell.id, ratio) for cell in (SHORT, LONG) for ratio in ("to copy", "to best peer")
    }


def test_a_change_of_either_ratio_counts_up_or_down() -> None:
    old, new = _forward(), _forward(ours=104.0)
    assert not reproduced([compare(old, new)], 0.03)
    assert not reproduced([compare(new, old)], 0.03)
    assert reproduced([compare(old, new)], 0.05)
    only_peer = compare(old, _forward(quack=115.0))
    assert [change.ratio for change in only_peer.changes if change.relative] == ["to best peer"]
    assert not reproduced([only_peer], 0.03)


def test_the_table_counts_and_the_list_names_what_moved() -> None:
    text = describe([compare(_forward(), _forward(ours=105.0))], 0.03)
    table, listed = text.split("\n\n")
    copy, peer = ([word.strip() for word in line.split("  ") if word.strip()] for line in table.splitlines()[2:])
    # 100 / 105 is 4.8 % less; the other cell's ratios stay, so the median is half of that.
    assert copy == ["forward", "to copy", "2", "2.4 %", "4.8 %", "50%"]
    assert peer == ["forward", "to best peer", "2", "2.4 %", "4.8 %", "50%"]
    assert LONG.id in listed
    assert SHORT.id not in listed
    assert "1.100  1.048  -4.8 %    quack" in listed


def test_a_peer_that_one_of_them_lacks_is_left_out_and_said() -> None:
    new = _forward()
    new.add(results("forward", (SHORT, "quack", 50.0)).rows[SHORT.id, "quack"])
    one = compare(_forward(), new)
    assert reproduced([one], 0.0)
    assert "forward: left out are 0 figures of the old results only, 1 of the new" in describe([one], 0.03)


@pytest.mark.parametrize("broken", ["old", "new"])
def test_a_failure_of_one_is_a_change_beyond_any_bound(broken: str) -> None:
    pair = {"old": _forward(), "new": _forward()} | {broken: _forward(ours=0.0)}
    one = compare(pair["old"], pair["new"])
    assert not reproduced([one], 1000.0)
    assert "none" in describe([one], 1000.0)


def test_a_failure_of_both_is_said() -> None:
    one = compare(_forward(ours=0.0), _forward(ours=0.0))
    assert f"normforge fails in both on {LONG.id}" in describe([one], 0.03)


def test_without_a_ceiling_the_peer_counts_alone() -> None:
    old, new = (results("host", (CALL, "eager", 10.0), (CALL, "normforge", us)) for us in (8.0, 8.1))
    one = compare(old, new)
    assert [change.ratio for change in one.changes] == ["to best peer"]
    assert one.changes[0].relative == pytest.approx(8.0 / 8.1 - 1)


def test_the_status_says_whether_all_is_within(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    _forward().save(old)
    results("host", (CALL, "normforge", 8.0)).save(old)
    rerun = _forward(ours=101.0)
    rerun.header["revision"] = "later"
    rerun.save(new)
    assert cli.main(["compare", str(old), str(new)]) == 0
    out = capsys.readouterr().out
    assert "within 3.0 %" in out
    assert "forward: revision none → later" in out
    assert "host: left out are 1 figures of the old results only, 0 of the new" in out
    assert cli.main(["compare", str(old), str(new), "--within", "0.005"]) == cli.SHORT
    assert LONG.id in capsys.readouterr().out


def test_nothing_in_common_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    _forward().save(old)
    results("forward", (LONG, "normforge", 8.0)).save(new)
    assert cli.main(["compare", str(old), str(new)]) == cli.USAGE
    assert f"{old} and {new} have no cell in common where normforge and a peer" in capsys.readouterr().err
    assert cli.main(["compare", str(old), str(tmp_path / "nowhere")]) == cli.USAGE


@pytest.mark.parametrize("bound", ["-0.1", "nan", "inf", "3%"])
def test_a_bound_has_to_be_one(bound: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["compare", "old", "new", f"--within={bound}"])
    assert f"'{bound}' is no bound; give a share of the old ratio, such as 0.03 for 3 %" in capsys.readouterr().err
