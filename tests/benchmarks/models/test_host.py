"""What norms take of the host within a step: each call is counted and timed, and nothing is left behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import cli
from benchmarks.models import host
from benchmarks.models.names import TRAIN
from benchmarks.models.specs import Spec
from benchmarks.models.worker import Job, Session
from benchmarks.timing import Spread

from ...thorough import THOROUGH
from .toy import add_variant, job_of


@THOROUGH
def test_each_variants_norms_are_timed_where_they_stand(
    toy: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    linear = nn.Linear.forward

    def waiting(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        # Norms are timed in other steps than those that are, which are to be longer also beside other work.
        time.sleep(0.02)
        return linear(self, x)

    monkeypatch.setattr(nn.Linear, "forward", waiting)

    def slow(model: nn.Module) -> None:
        forward = nn.LayerNorm.forward

        class SlowLayerNorm(nn.LayerNorm):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                time.sleep(0.02)
                return forward(self, x)

        model.get_submodule("1").__class__ = SlowLayerNorm

    add_variant(monkeypatch, "slow", slow)
    add_variant(monkeypatch, "without", lambda model: setattr(model, "1", nn.Identity()))
    made: list[Session] = []

    def make(job: Job) -> Session:
        made.append(Session(job))
        return made[-1]

    monkeypatch.setattr(host, "Session", make)
    job = job_of(tmp_path, variants=("torch", "slow", "without", "patch-passes"))
    found = host.measured(job)
    assert list(found) == ["torch", "slow"], "what calls no norm has no line"
    assert capsys.readouterr().err.splitlines() == [
        "skipped: toy, patch-passes: it is run compiled alone",
        "skipped: toy, without: no module that is called a norm is run in it",
    ]
    assert {taken.norms for taken in found.values()} == {1}
    assert found["torch"].norm.median < 15_000 < 20_000 <= found["slow"].norm.p20
    assert all(taken.norm.median < taken.step.median for taken in found.values())
    assert all("forward" not in vars(module) for name in found for module in made[0].varied(name).model.modules())


def test_a_line_is_a_variant() -> None:
    taken = host.Taken(13, Spread(41.02, 34.3, 50.04, 9), Spread(4487.0, 3922.0, 4745.0, 9))
    title, _, headers, _, line = host.table("gpt2", TRAIN, {"patch": taken}).splitlines()
    assert title == "**Training step of gpt2, bf16, eager**"
    assert [cell.strip() for cell in headers.split("|")[2:4]] == ["calls of norms", "a norm"]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells == ["patch", "13", "41.0", "34.3, 50.0", "4487.0", "3922.0, 4745.0"]


def test_the_command_says_what_ran(toy: Spec, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["model-host", "--models", "toy", "--steps", "train", "--variants", "torch", "patch", "--revision", "a test"]
    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    assert "revision: a test\n" in shown
    assert [line.split("|")[1].strip() for line in shown.splitlines() if line.startswith("| ")][1:] == [
        "torch",
        "patch",
    ]
