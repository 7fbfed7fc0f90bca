"""A run on the CPU: resuming, failures, the time limit, and the command from end to end."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks import cli, run
from benchmarks.cells import Suite
from benchmarks.inputs import Inputs
from benchmarks.results import Results, load, read
from benchmarks.runner import run_suite
from benchmarks.timing import summarise

from ..calling import there
from ..thorough import THOROUGH
from .small import CELLS, HEADER, SUITE, fails, loaded, plan, provider, torch_norm


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


def test_results_read_back_as_they_were_written(tmp_path: Path) -> None:
    results = Results("forward", {"device": "a test: with a colon", "revision": "none"})
    run_suite(SUITE, CELLS, results, plan(tmp_path, provider("copy", torch_norm), provider("broken", fails)))
    assert load(tmp_path, "forward") == results
    header, records = there(read(tmp_path, "forward", ["ratio_to_copy"]))
    assert header == results.header
    assert [record["ratio_to_copy"] for record in records] == ["", "1.0", "", "1.0"]
    assert load(tmp_path, "backward") is None


def test_spread() -> None:
    assert summarise([5.0]) == (5.0, 5.0, 5.0, 1)
    assert summarise([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (3.5, 2.0, 5.0, 6)


def test_the_command_measures_and_resumes(
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
    assert cli.main([*command[:-1], "r2"]) == cli.USAGE
    assert "(revision r1 there, r2 now); pass --fresh" in capsys.readouterr().err
