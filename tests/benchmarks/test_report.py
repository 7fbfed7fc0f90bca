"""Tables, goals and pictures of results that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cli
from benchmarks.cells import Cell, Norm, Task
from benchmarks.overview import SECTION
from benchmarks.pages import markers, put_into
from benchmarks.pictures import colours_of_peers, draw_all, heat_map
from benchmarks.reach import Rule, check, describe
from benchmarks.report import TABLES, WHAT, picture_for, render
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


def test_a_goal_may_ask_for_some_of_the_cells_and_some_of_the_peers(forward: Results) -> None:
    assert not check(RULE, forward).met
    assert check(Rule("most", "forward", copy=0.9, share=0.5), forward).met
    assert check(Rule("peers", "forward", peer=1.05, peers=("quack",)), forward).met
    assert not check(Rule("absent", "forward", peer=1.0, peers=("liger",)), forward).met
    assert [f.row.n for f in check(Rule("long", "forward", least_n=8192), forward).findings] == [8192]


def test_a_goal_may_be_held_against_another_cell(forward: Results) -> None:
    against = Rule("against", "forward", "*x8192", peer=1.5, peers=("eager",), against=LARGE.id)
    assert check(against, forward).findings[0].to_peer == pytest.approx(200 / 125)


def test_nothing_measured_reaches_nothing() -> None:
    assert not check(RULE, None).met
    assert "not measured" in describe([check(RULE, None)], every=False)


def test_a_failure_of_our_own_is_short() -> None:
    failed = results("forward", (LARGE, "copy", 1.0), (LARGE, "eager", 1.0), (LARGE, "normforge", 0.0))
    checked = check(RULE, failed)
    assert not checked.met
    assert "no such kernel" in describe([checked], every=False)


def test_shortfalls_are_listed_with_what_was_needed(forward: Results) -> None:
    text = describe([check(RULE, forward)], every=False)
    assert "1 of 2" in text
    assert LONG.id in text
    assert LARGE.id not in text
    assert "0.800 (≥ 0.9)" in text
    assert LARGE.id in describe([check(RULE, forward)], every=True)


def test_tables_name_failures_and_absences(forward: Results) -> None:
    text = render([forward])
    assert "Measured on a test, revision none." in text
    assert "| 32768×4096 |    2.68 |    4.88 |        5.16 |        5.37 |" in text
    assert "| 16384×8192 |    4.13 |  fails¹ |        4.29 |        5.37 |" in text


def test_lines_say_what_tells_them_apart() -> None:
    odd = Cell(Task.FORWARD, Norm.LAYER, 32744, 4099, group="odd rows")
    single = Cell(Task.FORWARD, Norm.LAYER, 2048, 8192, "fp32", group="fp32")
    calls = [Cell(task, Norm.LAYER, 16, 4096, group="ln") for task in (Task.GRAD_FORWARD, Task.GRAD_BOTH)]
    sweep = [Cell(task, Norm.LAYER, 4096, 1024, "fp16", group="x") for task in (Task.FORWARD, Task.BACKWARD)]
    made: dict[str, list[tuple[Cell, float]]] = {
        "forward": [(odd, 200.0), (single, 40.0)],
        "host": [(calls[0], 12.5), (calls[1], 90.0)],
        "tutorial": [(sweep[0], 10.0), (sweep[1], 20.0)],
    }
    made["groupnorm"] = [(SUITES["groupnorm"].cells[0], 10.0)]
    text = render([results(suite, *((cell, "normforge", us) for cell, us in rows)) for suite, rows in made.items()])
    lines = [[word.strip() for word in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    # 2 * 32744 * 4099 * 2 bytes in 200 µs, and so on; a host's call has its microseconds.
    for line in (
        ["32744×4099", "2.68"],
        ["ln_fp32, 2048×8192", "3.36"],
        ["forward, 4096×1024", "1.68"],
        ["backward, 4096×1024", "1.26"],
        ["forward, recorded", "12.50"],
        ["forward and backward", "90.00"],
        ["2×320×64×64, forward", "1.05"],
    ):
        assert line in lines


def test_a_table_may_have_its_cells_for_columns() -> None:
    cells = [cell for cell in SUITES["steps"].cells if cell.task is Task.FORWARD][:2]
    peers = ("step-forward-1", "normforge", "copy")
    text = render([results("steps", *((cell, name, 100.0) for cell in cells for name in peers))])
    lines = [[word.strip() for word in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == ["TB/s", "134216×1000", "131072×1024"]
    assert [line[0] for line in lines[2:]] == ["1 three sweeps", "normforge", "copy of x"]
    assert lines[2][1:] == ["5.37", "5.37"]


def test_the_speed_beside_the_tutorial_is_said() -> None:
    cells = {n: Cell(Task.FORWARD, Norm.LAYER, 4096, n, "fp16", group="forward") for n in (1024, 1536, 4096)}
    figures = [(cells[1024], 10.0, 15.0), (cells[1536], 10.0, 30.0), (cells[4096], 10.0, 0.0)]
    made = [
        (cell, name, us)
        for cell, *times in figures
        for name, us in zip(("normforge", "tutorial05"), times, strict=True)
    ]
    text = render([results("tutorial", *made)])
    said = "normforge over Triton's tutorial, times the speed: forward 1.50 to 3.00, 2.12 in the mean "
    assert f"{said}(N from 1024 to 1536)." in text
    assert "times the speed" not in render([results("tutorial", *(one for one in made if one[1] == "normforge"))])


def test_the_picture_above_tables_is_what_there_is(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert picture_for(page, tmp_path) is None
    (tmp_path / "steps-ratios.png").touch()
    assert picture_for(page, tmp_path) == "steps-ratios.png"
    assert "![Throughput of each step over that of a copy, by shape](steps-ratios.png)" in render(
        [results("steps")], picture_for(page, tmp_path)
    )
    (tmp_path / "forward.png").touch()
    assert picture_for(page, tmp_path) == "forward.png"


def test_the_readme_has_a_little_of_every_suite() -> None:
    everything = [
        results(suite.name, *((cell, name, 9.0) for cell in suite.cells for name in ("eager", "normforge", "copy")))
        for suite in SUITES.values()
    ]
    assert {table.suite for table in TABLES} == SUITES.keys() - {"sweep"}
    assert len(render(everything, "forward.png").splitlines()) <= 465


BEGIN, END = markers(WHAT)


def test_the_readme_keeps_what_is_around_the_markers(forward: Results, tmp_path: Path) -> None:
    forward.save(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert cli.main(["report", "--results", str(tmp_path), "--into", str(readme), "--pictures"]) == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n\nMeasured on a test")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert "](forward.png)" in text
    assert cli.main(["report", "--results", str(tmp_path), "--into", str(readme)]) == 0
    assert readme.read_text() == text


def test_tables_of_several_folders_go_between_markers_of_their_own(forward: Results, tmp_path: Path) -> None:
    forward.save(tmp_path)
    page = tmp_path / "page.md"
    first, last = markers("lists")
    page.write_text(f"{BEGIN}\nkept\n{END}\n{first}\n{last}\n")
    assert cli.main(["report", "--results", str(tmp_path), "--into", str(page), "--between", "lists"]) == 0
    text = page.read_text()
    assert text.startswith(f"{BEGIN}\nkept\n{END}\n{first}\n\nMeasured on a test")
    assert cli.main(["report", "--results", str(tmp_path), "--into", str(page), "--between", "nobody"]) == cli.USAGE
    assert page.read_text() == text


def test_a_readme_without_markers_is_left_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing")
    with pytest.raises(ValueError, match="lacks the markers"):
        put_into(readme, "tables", WHAT)
    assert readme.read_text() == "nothing"


def test_reach_says_by_its_status_whether_all_is_reached(
    forward: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forward.save(tmp_path)
    assert cli.main(["reach", "--results", str(tmp_path)]) == cli.SHORT
    assert "forward LN, N 768…16384" in capsys.readouterr().out


def test_a_folder_without_results_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--results", str(tmp_path)]) == cli.USAGE
    assert "make some with `python -m benchmarks run`" in capsys.readouterr().err


def test_no_two_peers_have_one_colour() -> None:
    colours = colours_of_peers()
    assert {"compile", "max-autotune", "eager", "liger", "quack", "tutorial05"} <= colours.keys()
    assert len(set(colours.values())) == len(colours)


def test_pictures_are_drawn(forward: Results, tmp_path: Path) -> None:
    few = tuple(Cell(Task.FORWARD, Norm.RMS, m, 4096, group="N = 4096") for m in (1, 16))
    decode = results("decode", *((cell, name, us) for cell in few for name, us in (("eager", 6.0), ("normforge", 2.0))))
    host = results("host", (few[1], "eager", 11.0), (few[1], "normforge", 9.0))
    paths = list(draw_all([forward, decode, host], tmp_path))
    names = ["forward.png", "forward-ratios.png", "decode.png", "decode-ratios.png", "host-ratios.png"]
    assert [path.name for path in paths] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_what_is_no_sweep_has_no_lines(tmp_path: Path) -> None:
    figures = [(cell, name, 9.0) for cell in SUITES["steps"].cells for name in ("normforge", "copy")]
    assert [path.name for path in draw_all([results("steps", *figures)], tmp_path)] == ["steps-ratios.png"]


def test_panels_of_one_shape_share_a_heat_map() -> None:
    odd, few = (Cell(Task.FORWARD, Norm.LAYER, m, n, group=g) for m, n, g in ((8, 1000, "odd rows"), (4, 4096, "few")))
    cells = (LARGE, LONG, odd, few)
    made = results("forward", *((cell, name, 10.0) for cell in cells for name in ("copy", "eager", "normforge")))
    large, single = heat_map(made).axes
    assert [label.get_text() for label in large.get_xticklabels()] == ["32768×4096", "16384×8192"]
    assert [label.get_text() for label in single.get_xticklabels()] == [
        "forward ln_bf16 8×1000",
        "forward ln_bf16 4×4096",
    ]


def test_cells_that_all_fail_on_are_no_obstacle_to_pictures(tmp_path: Path) -> None:
    broken = Cell(Task.FORWARD, Norm.RMS, 32768, 4096, group="256 MiB")
    failed = [(broken, "normforge", 0.0), (broken, "copy", 100.0)]
    assert [path.name for path in draw_all([results("forward", *failed)], tmp_path)] == []
    some = results("forward", *failed, (LARGE, "normforge", 104.0), (LARGE, "copy", 100.0))
    assert [path.name for path in draw_all([some], tmp_path)] == ["forward-ratios.png"]


def test_cells_and_providers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--suite", "host", "--only", "add_quant"]) == 0
    out = capsys.readouterr().out
    assert "host: Host time of one eager call, 2 of 12 cells" in out
    assert "  add_quant/ln_bf16_int8_sdq/16x4096" in out
    assert "providers: " in out


def test_an_overview_has_a_row_per_task_and_goes_between_its_markers(forward: Results, tmp_path: Path) -> None:
    forward.save(tmp_path)
    page = tmp_path / "page.md"
    first, last = markers(SECTION)
    page.write_text(f"before\n{first}\nold\n{last}\nafter\n")
    assert cli.main(["overview", "--results", str(tmp_path), "--into", str(page)]) == 0
    text = page.read_text()
    assert "| forward ln | " in text
    assert "Revisions: forward at " in text
    assert "old" not in text
    assert text.endswith(f"{last}\nafter\n")
    assert cli.main(["overview", "--results", str(tmp_path / "nothing")]) == cli.USAGE
