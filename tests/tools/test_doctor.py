"""`normforge doctor`: the facts, the problems, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge.tools.cli import main


@pytest.fixture(autouse=True)
def _no_variable_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NORMFORGE_PROPERTIES_SEED", raising=False)


def report(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_sound_installation_has_no_problems(empty_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = report(capsys)
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


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("NORMFORGE_ON_MISS", "foo", "NORMFORGE_ON_MISS='foo' is no policy"),
        ("NORMFORGE_FROZEN", "yes", "NORMFORGE_FROZEN='yes' is neither 1"),
        ("NORMFORGE_FROZE", "1", "NORMFORGE_FROZE is no setting of normforge's"),
        ("NORMFORGE_AOT", "nowhere", "nowhere holds no compiled kernels"),
        ("NORMFORGE_RECORD", "%x", "NORMFORGE_RECORD='%x' has '%x'"),
        ("NORMFORGE_CACHE", __file__, "cannot be written"),
        # Root may write anywhere by its permissions, and no file can be made in /proc.
        ("NORMFORGE_CACHE", "/proc/normforge", "; set NORMFORGE_CACHE to another folder"),
        ("TRITON_CACHE_DIR", "/proc/triton", "; set TRITON_CACHE_DIR to another folder"),
    ],
)
@pytest.mark.usefixtures("fresh_table")
def test_a_setting_that_is_wrong_is_a_problem(
    name: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    status, found = report(capsys)
    assert (status, found["ok"]) == (1, False)
    assert any(problem in each for each in found["problems"]), found["problems"]
    assert len(set(found["problems"])) == len(found["problems"])


@pytest.mark.parametrize("has_gpu", [False, True])
def test_without_a_compiler_the_report_asks_for_one(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Triton needs the compiler too, on a GPU alone."""
    from normforge.tools import doctor
    from normforge.upstream import triton_launcher

    def load(**_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(triton_launcher, "load", load)
    monkeypatch.setattr(doctor._Report, "_gpu", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    status, found = report(capsys)
    assert "Failed to find C compiler." in found["facts"]["C launcher"]
    assert "needs gcc or clang" in found["facts"]["C launcher"]
    assert status == has_gpu
    assert all("name a compiler in CC" in each for each in found["problems"])


def test_without_gpu_and_interpreter_the_report_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from normforge.tools import doctor

    monkeypatch.setattr(doctor, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, found = report(capsys)
    assert status == 1
    assert any("set TRITON_INTERPRET=1" in each for each in found["problems"])
