"""The command that times models: what becomes of rows, of jobs, and of what fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cli
from benchmarks.errors import UsageError
from benchmarks.models import command
from benchmarks.models.names import AUTOCAST, BF16, EAGER
from benchmarks.models.specs import Spec
from benchmarks.models.worker import Job, work

from ...thorough import THOROUGH
from .toy import BROKEN, HEADER, add_variant, job_of, loaded, of_norm, rows_of


def _call(function: Callable[[], object], model: Any) -> None:
    function()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Jobs of the command are done in this process; the list is of those that were."""
    done: list[Job] = []

    def launch(job: Job) -> int:
        done.append(job)
        work(job)
        return 0

    monkeypatch.setattr(command, "launch", launch)
    return done


def test_what_the_table_holds_is_not_run_again(toy: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    for name in ("one", "two", "three"):
        add_variant(monkeypatch, name, partial(_call, partial(runs.append, name)))
    work(job_of(tmp_path, variants=("one", "two")))
    first = rows_of(tmp_path)
    assert runs == ["one", "two"]
    work(job_of(tmp_path, variants=("one", "two", "three")))
    assert runs == ["one", "two", "three"]
    assert {name: rows_of(tmp_path)[name] for name in first} == first
    with pytest.raises(UsageError, match=r"revision none there, another now.*--fresh"):
        work(replace(job_of(tmp_path), header={**HEADER, "revision": "another"}))


@THOROUGH
def test_the_command_fails_for_a_wrong_row(
    toy: Spec,
    in_process: list[Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["models", "--models", "toy", "--runs", "eager", "--revision", "r", "--rounds", "1", "--out", str(tmp_path)]
    assert cli.main([*given, "--variants", "t*h", "patch"]) == 0
    assert set(rows_of(tmp_path)) == {"torch", "patch"}
    assert [(job.dtype, job.runs) for job in in_process] == [(BF16, (EAGER,)), (AUTOCAST, (EAGER,))]
    assert (tmp_path / "models.csv").read_text().startswith("# device: Triton's CPU interpreter\n")
    add_variant(monkeypatch, "broken", partial(of_norm, function=BROKEN["scaled"]))
    assert cli.main([*given, "--variants", "broken", "--dtypes", "bf16"]) == command.SHORT
    assert "toy/bf16/train/eager/broken is wrong: " in capsys.readouterr().err
    assert "# size: tiny\n" in (tmp_path / "models.csv").read_text()


@THOROUGH
def test_the_command_runs_a_process_for_each_model(tmp_path: Path) -> None:
    given = ["models", "--models", "dit", "--variants", "torch", "patch", "--dtypes", "bf16", "--runs", "eager"]
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert cli.main([*given, "--revision", "r", "--rounds", "1", "--out", str(tmp_path)]) == 0
    table = loaded(tmp_path)
    assert [(key.run, key.variant, row.ok) for key, row in table.rows.items()] == [
        (EAGER, "torch", True),
        (EAGER, "patch", True),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models.csv", "models.png"]
