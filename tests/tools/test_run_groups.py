"""`normforge run -norm group`: what it prints, and what it checks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from normforge.codegen.groups import GroupMode
from normforge.codegen.values import DType
from normforge.reference import grouped as group_reference
from normforge.reference.gradients import ReferenceGradients
from normforge.reference.grouped import GroupOutput
from normforge.tools import group_run, measured_run
from normforge.tools.group_problem import GroupProblem
from normforge.tools.machine import Machine

from .command_line import status

SMALL = ["run", "-norm=group", "-shape=3x8x5x6", "-groups=4"]


def test_what_was_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*SMALL, "-activation=silu", "-layout=channels_last") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "problem       GroupNorm fp16 -> fp16, 3x8x5x6 in 4 groups, SiLU applied, channels last\n"
    )
    assert printed.split()[-1] == "yes"
    assert status(*SMALL, "-json", "-e=0.1") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["arguments"]["shape"], found["arguments"]["eps"]) == ([3, 8, 5, 6], 0.1)
    assert found["kernel"] == "gn_fwd_fp16_one_pass"


@pytest.mark.parametrize("backward", [False, True])
def test_checks_reach_every_sample(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference takes samples by turns: what is wrong in the last is found, and sums are those of all."""
    monkeypatch.setattr(group_run, "REFERENCE_ELEMENTS", 1)
    mode = GroupMode(DType.FP32)
    if backward:
        mode = GroupMode(DType.FP32, next(way for way in type(mode.direction) if way is not mode.direction))
    run = group_run.prepare(GroupProblem(mode, (3, 8, 5, 6), 4), torch.device("cpu"))
    outputs = run.call()
    assert all(finding.ok for finding in run.validate(outputs))
    assert outputs[0] is not None
    outputs[0][-1, -1] += 1e-2
    assert [finding.ok for finding in run.validate(outputs)] == [False, True, True][: 3 if backward else 1]


def test_a_wrong_output_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    forward, backward = group_reference.group_norm, group_reference.group_norm_bwd

    def spoilt(*operands: Any, **options: Any) -> GroupOutput:
        found = forward(*operands, **options)
        return found._replace(y=found.y * 1.01)

    def spoilt_gradients(*operands: Any, **options: Any) -> ReferenceGradients:
        found = backward(*operands, **options)
        assert found.dbias is not None
        return found._replace(dbias=found.dbias * 1.01)

    monkeypatch.setattr(group_reference, "group_norm", spoilt)
    monkeypatch.setattr(group_reference, "group_norm_bwd", spoilt_gradients)
    assert status(*SMALL) == 1
    assert "no: y differ from the reference" in capsys.readouterr().out
    assert status(*SMALL, "-bwd=1") == 1
    assert "no: dbias differ from the reference" in capsys.readouterr().out


def test_the_rate_counts_every_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_run, "median_ms", lambda call, **counts: 1.0)
    card = Machine(torch.device("cpu"), "a card", interpreted=False)
    problem = GroupProblem(GroupMode(DType.FP16), (3, 8, 5, 6), 4, dtype_out=DType.FP32)
    result = group_run.solve(problem, card, validate=False, warmup=2, repeat=3)
    assert result.gb_per_s == pytest.approx((3 * 8 * 30 * (2 + 4) + 2 * 8 * 2) / 1e-3 / 1e9)
