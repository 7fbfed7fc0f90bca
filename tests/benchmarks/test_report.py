"""Tables, goals and pictures of results that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cli
from benchmarks.cells import Cell, Norm, Task
from benchmarks.overview import SECTION
from benchmarks.pages import markers
from benchmarks.pictures import draw_all
from benchmarks.reach import Rule, check, describe
from benchmarks.report import tables_of
from benchmarks.results import Results
from benchmarks.suites import SUITES

from .small import results

LARGE, LONG = (Cell(Task.FORWARD, Norm.LAYER, 32768 * 4096 // n, n, group="256 MiB") for n in (4096, 8192))
RULE = Rule("forward", "forward", copy=0.9, peer=1.0)


@pytest.fixture
def forward() -> Results:
    return results(
        "forward",
        (LARGE, "copy", 100.0),
        (LARGE, "eager", 200.0),
        (LARGE, "quack", 110.0),
        (LARGE, "normforge", 104.0),
        (LONG, "copy", 100.0),
        (LONG, "eager", 130.0),
        (LONG, "quack", 0.0),
        (LONG, "normforge", 125.0),
    )


def test_a_goal_is_held_against_the_copy_and_the_fastest_peer(forward: Results) -> None:
    large, long = check(RULE, forward).findings
    assert (large.to_copy, large.to_peer, large.best_peer) == pytest.approx((100 / 104, 110 / 104, "quack"))
    assert large.met
    assert (long.to_copy, long.to_peer, long.best_peer) == pytest.approx((0.8, 1.04, "eager"))
    assert not long.met


def test_nothing_measured_and_a_failure_of_our_own_are_short() -> None:
    failed = results("forward", (LARGE, "copy", 1.0), (LARGE, "eager", 1.0), (LARGE, "normforge", 0.0))
    for found, said in ((None, "not measured"), (failed, "no such kernel")):
        checked = check(RULE, found)
        assert not checked.met
        assert said in describe([checked], every=False)


def test_shortfalls_are_listed_with_what_was_needed(forward: Results) -> None:
    text = describe([check(RULE, forward)], every=False)
    assert "1 of 2" in text
    assert LONG.id in text
    assert LARGE.id not in text
    assert "0.800 (≥ 0.9)" in text
    assert LARGE.id in describe([check(RULE, forward)], every=True)


def test_a_table_has_a_line_a_cell_and_names_failures(forward: Results, tmp_path: Path) -> None:
    forward.save(tmp_path)
    (((line, (grid,)),)) = tables_of(tmp_path).items()
    assert line == "Measured on a test, revision none."
    assert grid.title == "Forward: forward, ln_bf16"
    assert grid.heads == ("TB/s", "torch", "QuACK", "normforge", "copy of x")
    assert grid.lines == [
        ("32768×4096", "2.68", "4.88", "5.16", "5.37"),
        ("16384×8192", "4.13", "fails", "4.29", "5.37"),
    ]
    assert grid.notes == ["QuACK: `fails: RuntimeError: no such kernel`."]


@pytest.mark.parametrize(
    ("argv", "section", "said"),
    [
        (["report", "--pictures", "--between", "lists"], "lists", ("Measured on a test", "](forward.png)")),
        (["overview"], SECTION, ("| forward ln | ", "Revisions: forward at ")),
    ],
)
def test_tables_go_between_their_markers_and_nothing_else_changes(
    argv: list[str], section: str, said: tuple[str, ...], forward: Results, tmp_path: Path
) -> None:
    forward.save(tmp_path)
    page = tmp_path / "page.md"
    (begin, end), (first, last) = markers("benchmarks"), markers(section)
    page.write_text(f"{begin}\nkept\n{end}\n{first}\nold\n{last}\nafter\n")
    into = ["--into", str(page)]
    assert cli.main([*argv, "--results", str(tmp_path), *into]) == 0
    text = page.read_text()
    assert text.startswith(f"{begin}\nkept\n{end}\n{first}\n")
    assert text.endswith(f"{last}\nafter\n")
    assert "old" not in text
    assert all(words in text for words in said)
    assert cli.main([*argv, "--results", str(tmp_path / "nothing"), *into]) == cli.USAGE
    page.write_text("no markers")
    assert cli.main([*argv, "--results", str(tmp_path), *into]) == cli.USAGE
    assert page.read_text() == "no markers"


def test_sweeps_are_drawn_as_lines_and_others_as_heat_maps(forward: Results, tmp_path: Path) -> None:
    few = tuple(Cell(Task.FORWARD, Norm.RMS, m, 4096, group="N = 4096") for m in (1, 16))
    decode = results("decode", *((cell, name, us) for cell in few for name, us in (("eager", 6.0), ("normforge", 2.0))))
    steps = results("steps", *((cell, name, 9.0) for cell in SUITES["steps"].cells for name in ("normforge", "copy")))
    paths = list(draw_all([forward, decode, steps], tmp_path))
    assert [path.name for path in paths] == ["forward.png", "decode.png", "steps-ratios.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    failed = results("steps", (SUITES["steps"].cells[0], "normforge", 0.0), (SUITES["steps"].cells[0], "copy", 9.0))
    assert list(draw_all([failed], tmp_path)) == []


def test_cells_and_providers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--suite", "host", "--only", "add_quant"]) == 0
    out = capsys.readouterr().out
    assert "host: Host time of one eager call, 2 of 12 cells" in out
    assert "  add_quant/ln_bf16_int8_sdq/16x4096" in out
    assert "providers: " in out
