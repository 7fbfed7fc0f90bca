"""`normforge run` of norms quantised as engines have it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from normforge.calls import road
from normforge.codegen.parameters import QUANTISED
from normforge.tools import run_options
from normforge.tools.cli import main

SMALL = ("-m=5", "-n=300", "-prec_i=bf16", "-prec_o=fp8")

pytestmark = pytest.mark.usefixtures("fresh_table")


def status(*argv: str) -> int:
    said = {word.partition("=")[0] for word in argv}
    try:
        return main(["run", *[word for word in SMALL if word.partition("=")[0] not in said], *argv])
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize(
    ("argv", "instance", "checked"),
    [
        (
            "-norm=rms -fquant=2 -group_size=128 -scale_layout=column_major -scale_format=ue8m0_packed -fadd=1 "
            "-save_unquant=1",
            "rms_fwd_bf16_fp8_e4m3fn_addst_dq_g128_ue8m0p_uq",
            "y_scale y residual_out unquantised",
        ),
        (
            "-fquant=1 -group_size=64 -scale_ub=0.1 -xbias=1 -quantise_rounded=1 -heads=5",
            "ln_fwd_bf16_fp8_e4m3fn_xb_sdq_g64_ub_qr",
            "y_scale y",
        ),
        ("-fquant=3 -save_unquant=1", "ln_fwd_bf16_fp8_e4m3fn_sq_uq", "y unquantised"),
        (
            "-fquant=2 -group_size=32 -scale_format=ue8m0 -scale_layout=swizzled_128x4 -fadd=1",
            "ln_fwd_bf16_fp8_e4m3fn_addst_dq_g32_ue8m0_swz",
            "y_scale y residual_out",
        ),
        (
            "-prec_o=fp4_e2m1fn -fquant=1 -group_size=16 -scale_format=e4m3 -scale_layout=swizzled_128x4",
            "ln_fwd_bf16_fp4_e2m1fn_sdq_g16_e4m3_swz",
            "y_scale y",
        ),
        ("-norm=rms -fquant=4 -x_stride=400", "rms_fwd_bf16_fp8_e4m3fn_scq", "y"),
        ("-norm=rms -fquant=2 -scale_ub=0.2", "rms_fwd_bf16_fp8_e4m3fn_dq_ub", "y_scale y"),
    ],
)
def test_a_run_agrees_with_the_reference(
    argv: str, instance: str, checked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(*argv.split(), "-json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["instance"] == f"{instance}_n512"
    assert list(found["errors"]) == checked.split()
    said = dict(word.lstrip("-").split("=") for word in argv.split())
    arguments = {name: str(value) for name, value in found["arguments"].items()}
    for name in ("group_size", "scale_layout", "scale_format", "scale_ub"):
        if name in said:
            assert arguments[name] == said[name]


@pytest.mark.parametrize(
    ("argv", "name"), [("-group_size=128 -scale_layout=column_major", "y_scale"), ("-save_unquant=1", "unquantised")]
)
def test_what_is_wrong_is_told(
    argv: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = road.launched

    def spoilt(*given: Any) -> Any:
        made = launched(*given)
        value: torch.Tensor = getattr(made, name)
        return made._replace(**{name: value + value.amax()})

    monkeypatch.setattr(road, "launched", spoilt)
    assert status("-fquant=2", *argv.split()) == 1
    (verdict,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("valid")]
    assert verdict.split()[1] == "no:"
    assert name in verdict.replace(",", "").split()


def test_there_is_an_option_for_all_that_a_call_is_told() -> None:
    """But for scales that are given, which -fquant says."""
    names = {option.name for option in run_options.OPTIONS}
    own = {"eps": "e", "out_dtype": "prec_o", "residual": "fadd", "x_bias": "xbias", "smooth_scale": "fquant"}
    own |= {"static_scale": "fquant", "column_scale": "fquant", "global_scale": "scale_format"}
    # Every problem has them, or none.
    beside = {"x", "weight", "bias", "weight_offset"}
    assert {own.get(row.name, row.name) for row in QUANTISED.parameters} - beside <= names


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "-fquant=2 -scale_layout=column_major",
            "-scale_layout column_major would be ignored: only scales of -group_si",
        ),
        ("-fquant=2 -scale_ub=-1", "-scale_ub -1.0 will not do; it takes a finite number above 0, or 0 for no bound"),
        ("-fquant=2 -scale_ub=nan", "-scale_ub nan will not do"),
        ("-fquant=3 -prec_sy=bf16", "-prec_sy bf16 would be ignored: only -fquant 1 and 2 write a scale"),
        ("-fquant=3 -group_size=64", "fquant static takes its scales from the caller"),
        ("-fquant=2 -group_size=64 -y_stride=400", "-y_stride 400 does not go with norms of quantised_layer_norm"),
        ("-fquant=2 -group_size=64 -fadd=2", "group_size 64 and fadd pre_add do not go together"),
        ("-fquant=2 -group_size=64 -save_mv=1", "group_size 64 and save_mv true do not go together"),
        ("-fquant=2 -group_size=65", "argument -group_size: invalid choice: '65'"),
        ("-fquant=2 -group_size=64 -bwd=1", "-fquant 2 does not go with -bwd 1: quantised outputs have no gradient"),
    ],
)
def test_what_does_not_go_together_is_refused(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*argv.split()) == 2
    assert message in capsys.readouterr().err


def test_group_norm_has_none_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ("-group_size=64", "-scale_ub=1", "-save_unquant=1"):
        with pytest.raises(SystemExit) as stop:
            main(["run", "-norm=group", "-shape=1x64x4x4", argv])
        assert stop.value.code == 2
        assert argv.partition("=")[0] in capsys.readouterr().err
