"""`normforge doctor` and what a measurement says of its machine: facts, problems, and the exit status."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import normforge
from normforge.tools import doctor
from normforge.tools.cli import main
from normforge.tools.environment import NOT_KNOWN, describe, revision_of
from normforge.tools.machine import Machine

from ..calling import outcome_of, table_at


@pytest.fixture(autouse=True)
def _no_variable_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NORMFORGE_PROPERTIES_SEED", raising=False)


def report() -> tuple[int, dict[str, Any]]:
    done = outcome_of(main, ["doctor", "--json"])
    return done.status, json.loads(done.out)


def test_a_sound_installation_has_no_problems(empty_cache: Path) -> None:
    status, found = report()
    assert (status, found["ok"], found["problems"]) == (0, True, [])
    facts = found["facts"]
    assert facts["normforge"] == normforge.__version__
    assert facts["torch"].startswith(torch.__version__)
    assert facts["interpreter"] == "on"
    assert facts["cache"].startswith(str(empty_cache))
    assert facts["cache"].endswith("(writable)")
    assert facts["NORMFORGE_CACHE"] == str(empty_cache)
    assert {"GPU", "Triton", "Python", "system", "C launcher", "table", "ahead of time"} <= facts.keys()
    assert not list(empty_cache.glob("*")) if empty_cache.exists() else True


@pytest.mark.parametrize(("name", "value", "problem"), table_at(Path(__file__).with_name("doctor.yaml"), globals()))
@pytest.mark.usefixtures("fresh_table")
def test_a_setting_that_is_wrong_is_a_problem(name: str, value: str, problem: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(name, value)
    status, found = report()
    assert (status, found["ok"]) == (1, False)
    assert any(problem in each for each in found["problems"]), found["problems"]
    assert len(set(found["problems"])) == len(found["problems"])


@pytest.mark.parametrize("has_gpu", [False, True])
def test_without_a_compiler_the_report_asks_for_one(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton needs the compiler too, on a GPU alone."""
    from normforge.upstream import triton_launcher

    monkeypatch.setattr(triton_launcher, "load", Mock(side_effect=RuntimeError("Failed to find C compiler.")))
    monkeypatch.setattr(doctor._Report, "_gpu", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    status, found = report()
    assert "Failed to find C compiler." in found["facts"]["C launcher"]
    assert "needs gcc or clang" in found["facts"]["C launcher"]
    assert status == has_gpu
    assert all("name a compiler in CC" in each for each in found["problems"])


def test_without_gpu_and_interpreter_the_report_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, found = report()
    assert status == 1
    assert any("set TRITON_INTERPRET=1" in each for each in found["problems"])


def git(at: Path, *command: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(["git", *who, *command], cwd=at, check=True, capture_output=True, text=True).stdout.strip()


def test_a_revision_says_whether_the_tree_was_changed_but_for_results(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "kernel").write_text("1")
    assert revision_of(tmp_path, "results") == NOT_KNOWN
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    short = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert revision_of(tmp_path, "results") == short
    (tmp_path / "results" / "sm_90.yaml").write_text("of this run")
    assert revision_of(tmp_path, "results") == short
    (tmp_path / "kernel").write_text("2")
    assert revision_of(tmp_path, "results") == f"{short}, with changes"
    # The revision of a checkout is not that of what is installed within it.
    assert revision_of(tmp_path / "results", "results") == NOT_KNOWN


def test_a_device_and_versions_are_named() -> None:
    said = describe(Machine(torch.device("cpu"), "a card", interpreted=False))
    assert (said["device"], said["driver"], said["torch"]) == ("a card", "none", torch.__version__)
