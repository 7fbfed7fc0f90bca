"""A run on the CPU: resuming, failures, the time limit, and the command from end to end."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cli, run, runner
from benchmarks.cells import Cell, Suite
from benchmarks.compile_ahead import compile_one
from benchmarks.inputs import Inputs
from benchmarks.results import PROJECT, Results, load, read
from benchmarks.runner import run_suite
from benchmarks.timing import summarise

from ..thorough import THOROUGH
from .small import CELLS, HEADER, SUITE, fails, loaded, lost, plan, provider, torch_norm


def _memory(inputs: Inputs) -> torch.Tensor:
    raise torch.OutOfMemoryError("tried to allocate 1000 GiB")


@THOROUGH
def test_failures_are_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    providers = (
        provider("broken", fails),
        provider("greedy", _memory),
        provider("wrong", lambda inputs: torch_norm(inputs) + 1),
        provider("right", torch_norm),
    )
    assert run_suite(SUITE, CELLS, Results("forward", HEADER), plan(tmp_path, *providers)) == 0
    found = loaded(tmp_path)
    for cell in CELLS:
        rows = found.of(cell.id)
        assert rows["broken"].status == "fails: RuntimeError: no kernel for this shape"
        assert rows["greedy"].status == "fails: OutOfMemoryError: tried to allocate 1000 GiB"
        assert rows["wrong"].status.startswith("fails: WrongOutputError: y is wrong")
        assert rows["right"].ok
        assert rows["right"].us > 0


@THOROUGH
def test_what_is_measured_is_not_measured_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def counted(inputs: Inputs) -> torch.Tensor:
        calls.append(inputs.cell.n)
        return torch_norm(inputs)

    first, second = provider("first", counted), provider("second", counted)
    run_suite(SUITE, CELLS[:1], Results("forward", HEADER), plan(tmp_path, first))
    assert set(calls) == {64}
    calls.clear()
    found = loaded(tmp_path)
    run_suite(SUITE, CELLS, found, plan(tmp_path, first))
    assert set(calls) == {128}
    calls.clear()
    run_suite(SUITE, CELLS, found, plan(tmp_path, first))
    assert calls == []
    run_suite(SUITE, CELLS, found, plan(tmp_path, first, second))
    assert set(calls) == {64, 128}
    assert len(found.rows) == 4


def test_a_reason_is_one_plain_line() -> None:
    assert runner.first_line(ValueError("\n\x1b[1;31mwrong\x1b[0m shape\nmore")) == "ValueError: wrong shape"


def test_no_cell_is_begun_after_the_deadline(tmp_path: Path) -> None:
    results = Results("forward", HEADER)
    late = plan(tmp_path, provider("peer", torch_norm), deadline=time.monotonic() - 1)
    assert run_suite(SUITE, CELLS, results, late) == 2
    assert not results.rows


def test_a_lost_gpu_is_recorded_and_the_run_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "release", lost)
    with pytest.raises(runner.ContextLostError, match="culprit on forward/ln_bf16/3x64: RuntimeError: CUDA error"):
        run_suite(SUITE, CELLS, Results("forward", HEADER), plan(tmp_path, provider("culprit", fails)))
    found = loaded(tmp_path)
    assert list(found.of(CELLS[0].id)) == ["culprit"]
    # Nor does it lose the GPU on each cell of the kind.
    assert found.of(CELLS[1].id)["culprit"].status == f"fails: not tried, for it lost the GPU on {CELLS[0].id}"
    with pytest.raises(runner.ContextLostError):
        run_suite(SUITE, CELLS, Results("forward", HEADER), plan(tmp_path, provider(PROJECT, fails)))
    found = loaded(tmp_path)
    assert not found.of(CELLS[1].id)

    commands: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, command: commands.append(command[3:]))
    run._begin_again(["run", "--jobs", "8", "--fresh", "--suite", "forward"], deadline=None)
    run._begin_again(["run", "--minutes", "9"], deadline=time.monotonic() + 120)
    assert commands[0] == ["run", "--jobs", "8", "--suite", "forward", "--jobs", "0"]
    assert commands[1][-1] == "2.00"


def test_compiling_ahead_says_what_failed() -> None:
    assert compile_one(CELLS[0], "eager", "cpu") == ""
    assert compile_one(CELLS[0], "nobody", "cpu") == "KeyError: 'nobody'"


def test_results_read_back_as_they_were_written(tmp_path: Path) -> None:
    results = Results("forward", {"device": "a test: with a colon", "revision": "none"})
    run_suite(SUITE, CELLS, results, plan(tmp_path, provider("copy", torch_norm), provider("broken", fails)))
    assert load(tmp_path, "forward") == results
    found = read(tmp_path, "forward", ["ratio_to_copy"])
    assert found is not None
    assert found[0] == results.header
    assert [record["ratio_to_copy"] for record in found[1]] == ["", "1.0", "", "1.0"]
    assert load(tmp_path, "backward") is None


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "forward.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"forward\.csv lacks the columns of a results file"):
        load(tmp_path, "forward")


def test_spread() -> None:
    assert summarise([5.0]) == (5.0, 5.0, 5.0, 1)
    assert summarise([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (3.5, 2.0, 5.0, 6)


def test_the_command_measures_draws_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Suite("forward", "Forward", SUITE.method, tuple(dataclasses.replace(cell, m=9) for cell in CELLS))
    monkeypatch.setattr(run, "SUITES", {"forward": small})
    command = ["run", "--suite", "forward", "--rows", "2", "--providers", "eager", "copy", "normforge"]
    command += ["--out", str(tmp_path), "--revision", "r1"]
    assert cli.main([*command, "--only", "2x64"]) == 0
    assert cli.main(command) == 0
    found = loaded(tmp_path)
    assert len(found.rows) == 6
    assert all(row.ok and row.m == 2 for row in found.rows.values())
    assert found.header["revision"] == "r1"
    assert (tmp_path / "forward.png").stat().st_size > 0
    capsys.readouterr()
    assert cli.main([*command[:-1], "r2"]) == cli.USAGE
    assert "(revision r1 there, r2 now); pass --fresh" in capsys.readouterr().err
    assert cli.main([*command, "--only", "nothing"]) == cli.USAGE
    assert "--only nothing matches no cell" in capsys.readouterr().err


def test_a_share_stays_the_same_when_it_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two suites, of three and of two cells, the first of two shares is every other cell."""
    cells = tuple(dataclasses.replace(CELLS[0], n=n) for n in (64, 128, 192, 256, 320))
    suites = {
        "forward": Suite("forward", "Forward", SUITE.method, cells[:3]),
        "tutorial": Suite("tutorial", "Tutorial", SUITE.method, cells[3:]),
    }
    monkeypatch.setattr(run, "SUITES", suites)
    command = ["run", "--suite", *suites, "--providers", "copy", "--out", str(tmp_path), "--share", "1/2"]
    run_cell = runner.run_cell

    def interrupted(suite: Suite, cell: Cell, *rest: Any) -> None:
        if cell.n == 192:
            raise KeyboardInterrupt
        run_cell(suite, cell, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_cell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cli.main(command)
    assert [row.n for row in loaded(tmp_path).rows.values()] == [64]
    assert cli.main(command) == 0
    assert [row.n for name in suites for row in loaded(tmp_path, name).rows.values()] == [64, 192, 320]
