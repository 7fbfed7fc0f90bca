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
from benchmarks.models.names import EAGER
from benchmarks.models.specs import Spec
from benchmarks.models.worker import work

from ...thorough import THOROUGH
from .toy import HEADER, add_variant, job_of, loaded, rows_of


def _call(function: Callable[[], object], model: Any) -> None:
    function()


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
def test_the_command_runs_a_process_for_each_model(tmp_path: Path) -> None:
    given = ["models", "--models", "dit", "--variants", "torch", "patch", "--dtypes", "bf16", "--runs", "eager"]
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert cli.main([*given, "--revision", "r", "--rounds", "1", "--out", str(tmp_path)]) == 0
    table = loaded(tmp_path)
    assert [(key.run, key.variant, row.ok) for key, row in table.rows.items()] == [
        (EAGER, "torch", True),
        (EAGER, "patch", True),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models.csv"]
