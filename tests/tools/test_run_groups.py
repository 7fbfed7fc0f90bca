"""`normforge run -norm group`: what it prints, what it checks, and what it refuses."""

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
from normforge.tools.cli import main
from normforge.tools.group_problem import GroupProblem
from normforge.tools.machine import Machine

SMALL = ["run", "-norm=group", "-shape=3x8x5x6", "-groups=4"]


def status(*argv: str) -> int:
    """The exit status of a command line, whether it is returned or raised by argparse."""
    try:
        return main([*SMALL, *argv])
    except SystemExit as stop:
        return int(str(stop.code))


@pytest.mark.parametrize(
    ("argv", "instance", "checked"),
    [
        ("", "gn_fwd_fp16_n128", {"y"}),
        ("-activation=silu -layout=channels_last -prec_i=bf16 -e=0.1", "gn_fwd_bf16_silu_cl_n128", {"y"}),
        ("-prec_i=bf16 -prec_o=fp32", "gn_fwd_bf16_n128", {"y"}),
        ("-bwd=1 -activation=silu", "gn_bwd_fp16_silu_n128", {"dx", "dweight", "dbias"}),
        ("-bwd=1 -prec_i=fp32 -layout=channels_last", "gn_bwd_fp32_cl_n128", {"dx", "dweight", "dbias"}),
    ],
)
def test_every_output_is_checked(
    argv: str, instance: str, checked: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("-json", *argv.split()) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["instance"], line["kernel"]) == (instance, instance.replace("n128", "one_pass"))
    assert set(line["errors"]) == checked
    assert line["valid"] is True
    assert line["arguments"]["shape"] == [3, 8, 5, 6]
    assert line["arguments"]["eps"] == (0.1 if "-e" in argv else 1e-5)


def test_what_was_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("-activation=silu", "-layout=channels_last") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "problem       GroupNorm fp16 -> fp16, 3x8x5x6 in 4 groups, SiLU applied, channels last\n"
    )
    assert printed.split()[-1] == "yes"


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
    assert status() == 1
    assert "no: y differ from the reference" in capsys.readouterr().out
    assert status("-bwd=1") == 1
    assert "no: dbias differ from the reference" in capsys.readouterr().out


def test_the_rate_counts_every_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_run, "median_ms", lambda call, **counts: 1.0)
    card = Machine(torch.device("cpu"), "a card", interpreted=False)
    problem = GroupProblem(GroupMode(DType.FP16), (3, 8, 5, 6), 4, dtype_out=DType.FP32)
    result = group_run.solve(problem, card, validate=False, warmup=2, repeat=3)
    assert result.gb_per_s == pytest.approx((3 * 8 * 30 * (2 + 4) + 2 * 8 * 2) / 1e-3 / 1e9)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("-m=3", "-m 3 would be ignored: -norm group takes -shape, -groups, -layout,"),
        ("-fadd=1", "-fadd 1 would be ignored: -norm group takes"),
        ("-save_mv=1", "-save_mv 1 would be ignored: -norm group takes"),
        ("-prec_i=fp8", "-prec_i fp8 does not go with -norm group; pass one of fp16, bf16, fp32"),
        ("-prec_o=int8", "-prec_o int8 does not go with -norm group"),
        ("-bwd=1 -prec_o=fp32", "-prec_o fp32 does not go with -bwd 1"),
        ("-activation=sigmoid", "-activation sigmoid does not go with -norm group; pass one of none, silu"),
        ("-e=nan", "-e nan will not do"),
    ],
)
def test_what_is_refused(argv: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*argv.split()) == 2
    assert problem in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("-norm=group -shape=4", "-shape 4 is no shape; write the sizes of (B, C, ...) as 2x320x64x64"),
        ("-norm=group -shape=2x8x3 -groups=5", "-groups 5 does not divide the 8 channels of -shape 2x8x3"),
        ("-norm=group -shape=2x32", "-shape 2x32 lies in memory as -layout channels_last does"),
        ("-norm=group -shape=2x32x1 -layout=channels_last", "-shape 2x32x1 lies in memory as -layout contiguous does"),
        ("-shape=2x32x1", "-shape 2x32x1 would be ignored: only -norm group reads it"),
        ("-groups=8", "-groups 8 would be ignored: only -norm group reads it"),
        ("-layout=channels_last", "-layout channels_last would be ignored: only -norm group reads it"),
        ("-activation=none -gate=after_norm", "-activation none is none of a gate; pass one of silu, sigmoid"),
    ],
)
def test_what_does_not_go_together(argv: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", *argv.split()])
    assert stopped.value.code == 2
    assert problem in " ".join(capsys.readouterr().err.split())
