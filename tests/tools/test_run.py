"""`normforge run` and `demo`: what they take, print and write, what they find wrong, and what they refuse."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge import reference
from normforge.calls import road
from normforge.calls.outputs import LayerNormOutput
from normforge.calls.row_layout import row_stride
from normforge.codegen.model import Mode
from normforge.codegen.parameters import QUANTISED as FAMILY
from normforge.codegen.values import Cast, DType, FusedAdd, FusedQuant, Norm, Rounding
from normforge.families.in_parts import InParts
from normforge.kernels.strides import RowWalk
from normforge.reference.gradients import ReferenceGradients
from normforge.tools import checked_run, measured_run, run, run_options
from normforge.tools.checked_run import solve
from normforge.tools.cli import VERBS
from normforge.tools.compare import ModulatedGradients
from normforge.tools.machine import Machine
from normforge.tools.measured_run import Result
from normforge.tools.problem import Problem, Strides
from normforge.tools.problem_tensors import gradients_in, inputs, poisoned_outputs
from normforge.tools.run_options import parse

from .command_line import status

_FP16 = Mode(Norm.LAYER, DType.FP16, DType.FP16)

SMALL = ("run", "-m=3", "-n=48")
HEADS = ("run", "-m=9", "-n=48", "-heads=3")
BACKWARD = ("run", "-m=5", "-n=130", "-bwd=1")
MODULATED = ("run", "-m=27", "-n=48", "-samples=3", "-bwd=1", "-fadd=1", "-xgate=1")
QUANTISED = ("run", "-m=5", "-n=300", "-prec_i=bf16", "-prec_o=fp8", "-fquant=2")


@pytest.fixture
def replace_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put another kernel call in LayerNorm's place; the reference stays."""

    def replace(forward: Callable[..., LayerNormOutput]) -> None:
        monkeypatch.setitem(checked_run._FORWARD, Norm.LAYER, (forward, normforge.reference.layernorm2d_fwd))

    return replace


def test_the_defaults_are_those_of_ck_tiles_example() -> None:
    request = parse([], "run")
    assert request.problem == Problem(3328, 4096, _FP16, eps=1e-5, strides=Strides.all(4096))
    assert (request.validate, request.print_names, request.warmup, request.repeat) == (True, True, 5, 20)
    assert not request.json


def test_an_equals_sign_and_a_space_mean_the_same() -> None:
    spaced = "-m 10 -n 1024 -prec_o int8 -fquant 1 -fadd 1 -stride -1 -e 1e-6 -norm rms"
    assert parse(spaced.split(), "run") == parse([f"-{pair}" for pair in _pairs(spaced)], "run")


def _pairs(spaced: str) -> list[str]:
    words = spaced.split()
    return [f"{name[1:]}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("-prec_i bf16", {"dtype_in": DType.BF16, "dtype_out": DType.BF16}),
        ("-prec_i bf16 -prec_o fp32", {"dtype_out": DType.FP32}),
        ("-fquant 1", {"dtype_out": DType.INT8, "prec_sm": DType.FP32, "scale_dtype": DType.FP32}),
        ("-fquant 1 -prec_sm fp16 -prec_sy bf16", {"prec_sm": DType.FP16, "scale_dtype": DType.BF16}),
        ("-fquant 2 -prec_o fp8", {"dtype_out": DType.FP8_E4M3FN, "fquant": FusedQuant.DYNAMIC}),
        ("-fquant 2 -prec_o fp8_e5m2", {"dtype_out": DType.FP8_E5M2}),
        ("-prec_i fp8", {"dtype_in": DType.FP8_E4M3FN, "dtype_out": DType.BF16}),
        ("-prec_i fp8_e5m2 -fquant 2", {"dtype_in": DType.FP8_E5M2, "dtype_out": DType.INT8}),
        ("-prec_i fp8 -prec_o fp8 -fquant 2", {"dtype_out": DType.FP8_E4M3FN}),
        ("-n 64 -stride 80", {"strides": Strides.all(80)}),
        ("-n 64 -fadd 1 -stride 80 -y_stride 96", {"strides": Strides(x=80, residual=80, y=96, residual_out=80)}),
        ("-n 64 -fadd 1 -xr_stride 70 -yr_stride 72", {"strides": Strides(x=64, residual=70, y=64, residual_out=72)}),
        ("-m 12 -n 64 -heads 4", {"heads": 4, "strides": Strides(x=768, residual=256, y=256, residual_out=256)}),
        ("-m 12 -n 64 -heads 4 -stride 300 -x_stride 256", {"strides": replace(Strides.all(300), x=256)}),
        ("-norm rms", {"eps": 1e-6}),
        ("-norm rms -e 1e-5", {"eps": 1e-5}),
        ("-norm rms -save_mv 1 -xbias 1", {"norm": Norm.RMS, "save_mv": True, "x_bias": True}),
        ("-fquant 2 -rounding truncate", {"rounding": Rounding.TRUNCATE}),
        ("-cast before_weight", {"cast": Cast.BEFORE_WEIGHT}),
    ],
)
def test_arguments_resolve_to_a_problem(argv: str, expected: dict[str, Any]) -> None:
    found = parse(argv.split(), "run").problem
    told = {**vars(found), **vars(found.mode)}
    assert {name: told[name] for name in expected} == expected


def test_the_command_of_ck_tiles_readme(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("run", "-m=10", "-n=1024", "-prec_o=int8", "-fquant=1", "-fadd=1") == 0
    words = capsys.readouterr().out.split()
    assert "ln_fwd_fp16_int8_addst_sdq_n1024" in words
    assert "ln_fwd_fp16_int8_addst_sdq_one_pass" in words
    assert {"y", "residual_out", "y_scale"} <= set(words)
    assert words[-2:] == ["valid", "yes"]
    assert "GB/s" not in words


# By the arguments that they begin with: the others of each run, its instance, and the outputs that are checked.
RUNS: dict[str, list[tuple[str, ...]]] = {
    "-m=3 -n=48": [
        ("-norm=rms -prec_i=fp32 -save_mv=1", "rms_fwd_fp32_mv_n128", "y rstd"),
        ("-prec_o=fp32 -xbias=1 -save_mv=1", "ln_fwd_fp16_fp32_xb_mv_n128", "y mean rstd"),
        ("-fadd=2 -fquant=2 -prec_o=fp8 -prec_sy=fp16", "ln_fwd_fp16_fp8_e4m3fn_add_dq_sfp16_n128", "y y_scale"),
        ("-fadd=1 -x_stride=50 -xr_stride=51 -y_stride=52 -yr_stride=53", "ln_fwd_fp16_addst_n128", "y residual_out"),
        ("-norm=rms -fquant=1 -prec_sm=fp16 -prec_o=fp8_e4m3fnuz", "rms_fwd_fp16_fp8_e4m3fnuz_sdq_n128", "y y_scale"),
        ("-fquant=2 -rounding=truncate", "ln_fwd_fp16_int8_dq_trunc_n128", "y y_scale"),
        ("-prec_i=fp8 -fadd=1 -save_mv=1", "ln_fwd_fp8_e4m3fn_bf16_addst_mv_n128", "y residual_out mean rstd"),
        (
            "-norm=rms -prec_i=fp8_e5m2 -prec_o=fp8 -fquant=1 -x_stride=50",
            "rms_fwd_fp8_e5m2_fp8_e4m3fn_sdq_n128",
            "y y_scale",
        ),
        ("-norm=rms -prec_i=bf16 -prec_o=fp32 -cast=before_weight", "rms_fwd_bf16_fp32_cbw_n128", "y"),
        ("-norm=rms -prec_i=bf16 -cast=before_weight -bwd=1", "rms_bwd_bf16_cbw_n128", "dx dweight"),
    ],
    "-m=6 -n=48 -samples=2": [
        ("", "ln_fwd_fp16_mod_n128", "y"),
        ("-norm=rms -prec_i=bf16 -save_mv=1 -x_stride=60", "rms_fwd_bf16_mod_mv_n128", "y rstd"),
        ("-fadd=1 -xgate=1 -prec_o=fp32 -xr_stride=50", "ln_fwd_fp16_fp32_xg_addst_mod_n128", "y residual_out"),
        ("-fquant=2 -save_mv=1", "ln_fwd_fp16_int8_mod_dq_mv_n128", "y y_scale mean rstd"),
        (
            "-norm=rms -prec_i=bf16 -fadd=1 -xgate=1 -fquant=2 -prec_o=fp8",
            "rms_fwd_bf16_fp8_e4m3fn_xg_addst_mod_dq_n128",
            "y residual_out y_scale",
        ),
    ],
    "-m=6 -n=48": [
        ("-gate=after_norm", "ln_fwd_fp16_ga_n128", "y"),
        ("-gate=before_norm -norm=rms -prec_i=bf16 -save_mv=1 -group=16", "rms_fwd_bf16_gb_grp_mv_n128", "y rstd"),
        ("-gate=after_norm -activation=sigmoid -fquant=2 -x_stride=60", "ln_fwd_fp16_int8_ga_sig_dq_n128", "y y_scale"),
        ("-gate=after_norm -heads=3 -norm=rms", "rms_fwd_fp16_ga_n128", "y"),
        ("-gate=after_norm -bwd=1 -group=24", "ln_bwd_fp16_ga_grp_n128", "dx dgate dweight dbias"),
        (
            "-gate=before_norm -bwd=1 -norm=rms -activation=sigmoid -prec_i=bf16",
            "rms_bwd_bf16_gb_sig_n128",
            "dx dgate dweight",
        ),
    ],
    "-m=9 -n=48 -heads=3": [
        ("-norm=rms -prec_i=bf16 -save_mv=1", "rms_fwd_bf16_mv_n128", "y rstd"),
        ("-fadd=1 -fquant=1 -xr_stride=200 -y_stride=150", "ln_fwd_fp16_int8_addst_sdq_n128", "y residual_out y_scale"),
        ("-prec_i=fp8 -fadd=1", "ln_fwd_fp8_e4m3fn_bf16_addst_n128", "y residual_out"),
        ("-fadd=1 -xbias=1 -bwd=1", "ln_bwd_fp16_addst_n128", "dx dweight dbias dx_bias"),
        ("-norm=rms -xbias=1 -y_stride=190 -bwd=1", "rms_bwd_fp16_xb_n128", "dx dweight dx_bias"),
    ],
    "-m=5 -n=130 -bwd=1": [
        ("-norm=layer", "ln_bwd_fp16_n256", "dx dweight dbias"),
        ("-norm=rms -prec_i=bf16", "rms_bwd_bf16_n256", "dx dweight"),
        ("-fadd=1 -prec_i=bf16", "ln_bwd_bf16_addst_n256", "dx dweight dbias"),
        ("-xbias=1 -norm=rms", "rms_bwd_fp16_xb_n256", "dx dweight dx_bias"),
        ("-xbias=1 -fadd=1", "ln_bwd_fp16_addst_n256", "dx dweight dbias dx_bias"),
        ("-xbias=1 -fadd=1 -norm=rms", "rms_bwd_fp16_addst_n256", "dx dweight dx_bias"),
        ("-dropout=0.3 -fadd=1", "ln_bwd_fp16_drop_addst_n256", "dx dweight dbias ddropped"),
        ("-dropout=0.3 -fadd=1 -xbias=1 -norm=rms", "rms_bwd_fp16_drop_addst_n256", "dx dweight dx_bias ddropped"),
        ("-x_stride=150 -y_stride=140", "ln_bwd_fp16_n256", "dx dweight dbias"),
    ],
    "-m=27 -n=48 -samples=3 -bwd=1": [
        ("", "ln_bwd_fp16_mod_n128", "dx dscale dshift dweight dbias"),
        ("-norm=rms -prec_i=bf16", "rms_bwd_bf16_mod_n128", "dx dscale dshift dweight"),
        ("-norm=rms -fadd=1 -stride=60", "rms_bwd_fp16_addst_mod_n128", "dx dscale dshift dresidual dweight"),
        (
            "-fadd=1 -xgate=1 -prec_i=bf16 -x_stride=56",
            "ln_bwd_bf16_xg_addst_mod_n128",
            "dx dscale dshift dgate dresidual dweight dbias",
        ),
        ("-fadd=1 -xgate=1 -norm=rms", "rms_bwd_fp16_xg_addst_mod_n128", "dx dscale dshift dgate dresidual dweight"),
        (
            "-fadd=1 -xgate=1 -prec_i=fp32",
            "ln_bwd_fp32_xg_addst_mod_n128",
            "dx dscale dshift dgate dresidual dweight dbias",
        ),
    ],
    "-norm=group -shape=3x8x5x6 -groups=4": [
        ("", "gn_fwd_fp16_n128", "y"),
        ("-activation=silu -layout=channels_last -prec_i=bf16 -e=0.1", "gn_fwd_bf16_silu_cl_n128", "y"),
        ("-prec_i=bf16 -prec_o=fp32", "gn_fwd_bf16_n128", "y"),
        ("-bwd=1 -activation=silu", "gn_bwd_fp16_silu_n128", "dx dweight dbias"),
        ("-bwd=1 -prec_i=fp32 -layout=channels_last", "gn_bwd_fp32_cl_n128", "dx dweight dbias"),
    ],
    "-m=5 -n=300 -prec_i=bf16": [
        (
            "-prec_o=fp8 -norm=rms -fquant=2 -group_size=128 -scale_layout=column_major "
            "-scale_format=ue8m0_packed -fadd=1 -save_unquant=1",
            "rms_fwd_bf16_fp8_e4m3fn_addst_dq_g128_ue8m0p_uq_n512",
            "y_scale y residual_out unquantised",
        ),
        (
            "-prec_o=fp8 -fquant=1 -group_size=64 -scale_ub=0.1 -xbias=1 -quantise_rounded=1 -heads=5",
            "ln_fwd_bf16_fp8_e4m3fn_xb_sdq_g64_ub_qr_n512",
            "y_scale y",
        ),
        ("-prec_o=fp8 -fquant=3 -save_unquant=1", "ln_fwd_bf16_fp8_e4m3fn_sq_uq_n512", "y unquantised"),
        (
            "-prec_o=fp8 -fquant=2 -group_size=32 -scale_format=ue8m0 -scale_layout=swizzled_128x4 -fadd=1",
            "ln_fwd_bf16_fp8_e4m3fn_addst_dq_g32_ue8m0_swz_n512",
            "y_scale y residual_out",
        ),
        (
            "-prec_o=fp4_e2m1fn -fquant=1 -group_size=16 -scale_format=e4m3 -scale_layout=swizzled_128x4",
            "ln_fwd_bf16_fp4_e2m1fn_sdq_g16_e4m3_swz_n512",
            "y_scale y",
        ),
        ("-prec_o=fp8 -norm=rms -fquant=4 -x_stride=400", "rms_fwd_bf16_fp8_e4m3fn_scq_n512", "y"),
        ("-prec_o=fp8 -norm=rms -fquant=2 -scale_ub=0.2", "rms_fwd_bf16_fp8_e4m3fn_dq_ub_n512", "y_scale y"),
    ],
}


@pytest.mark.parametrize(
    ("argv", "instance", "checked"),
    [(f"{first} {others}", *found) for first, rows in RUNS.items() for others, *found in rows],
)
def test_a_run_agrees_with_the_reference(
    argv: str, instance: str, checked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("run", "-json", *argv.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["instance"] == instance
    assert list(found["errors"]) == checked.split()
    assert found["valid"] is True
    said = dict(word.lstrip("-").split("=") for word in argv.split())
    for name in ("group_size", "scale_layout", "scale_format", "scale_ub"):
        assert name not in said or str(found["arguments"][name]) == said[name]


# By the arguments that they begin with: the others, and what is said of each.
REFUSED: dict[str, list[tuple[str, ...]]] = {
    "": [
        ("run -q 1", "no option -q", "normforge run -h"),
        ("run -rep 3", "no option -rep", "did you mean -repeat"),
        ("run -prec_i fp64", "-prec_i", "'fp64'", "bf16"),
        ("run -m ten", "-m", "'ten'"),
        ("run -m 0", "-m 0", "at least 1"),
        ("run -repeat 0", "-repeat 0", "at least 1"),
        ("run -e nan", "-e nan", "finite"),
        ("run -n 64 -stride 48", "-stride 48", "-n 64", "at least 64"),
        ("run -n 64 -y_stride 0", "-y_stride 0", "-n 64"),
        ("run -heads 0", "-heads 0", "at least 1"),
        ("run -m 10 -heads 4", "-m 10", "-heads 4", "a multiple, 12 say"),
        ("run -m 8 -n 64 -heads 4 -x_stride 255", "-x_stride 255", "-heads 4 of -n 64", "at least 256"),
        ("run -prec_sm fp16", "-prec_sm fp16 would be ignored", "-fquant 1"),
        ("run -fquant 2 -prec_sm fp16", "-prec_sm fp16 would be ignored"),
        ("run -prec_sy fp32", "-prec_sy fp32 would be ignored"),
        ("run -xr_stride 4096", "-xr_stride 4096 would be ignored", "-fadd 1 and 2"),
        ("run -fadd 2 -yr_stride 4096", "-yr_stride 4096 would be ignored", "-fadd 1"),
        ("run -prec_o int8", "-prec_o int8", "-fquant 0", "fp16, bf16, fp32", "-fquant 1 or -fquant 2"),
        ("run -fquant 2 -prec_o fp16", "-prec_o fp16", "-fquant 2", "int8, fp8", "or -fquant 0"),
        ("run -prec_i fp8 -bwd 1", "-prec_i fp8 does not go with -bwd 1", "norms of fp8 have no gradient"),
        ("run -prec_i fp8_e4m3fnuz", "-prec_i", "'fp8_e4m3fnuz'", "fp8_e5m2"),
        ("run 10", "10"),
        ("list --all", "--all"),
        ("list ln_fwd_fp61_*", "'ln_fwd_fp61_*'", "nearest", "ln_fwd_fp16_"),
        ("demo fast", "fast"),
        ("bench", "no verb 'bench'", ", ".join(VERBS)),
        ("", "a verb is needed", ", ".join(VERBS)),
    ],
    "run -m=6 -n=48": [
        ("-samples 4", "-m 6 rows are no whole number of rows a sample with -samples 4"),
        (
            "-samples 2 -bwd 1",
            "-m 6 with -samples 2 is 3 rows a sample, and the backward kernels take 8 or more; pass -m 16,",
        ),
        ("-samples 2 -heads 3", "-heads 3 does not go with -samples 2"),
        ("-samples 2 -y_stride 60", "-y_stride 60 does not go with -samples 2: they write where they allocate"),
        ("-xgate 1", "-xgate 1 would be ignored: only rows of -samples are gated"),
        ("-samples 2 -xgate 1", "x_gate scales x before a residual is added to it, and fadd is none"),
        ("-samples 2 -fquant 1", "modulated norms have no fquant smooth_dynamic"),
        ("-samples 2 -fquant 2 -prec_sy fp16", "modulated norms have no scale_dtype fp16"),
        ("-samples 2 -fquant 2 -rounding truncate", "modulated norms have no rounding truncate"),
        ("-gate after_norm -group 7", "-group 7 does not divide -n 48"),
        (
            "-gate after_norm -group 16 -heads 3",
            "-heads 3 does not go with -gate after_norm: groups are of rows of one",
        ),
        ("-gate after_norm -samples 2", "-samples 2 does not go with -gate after_norm: a norm has one neighbour"),
        ("-gate after_norm -y_stride 60", "-y_stride 60 does not go with -gate after_norm: they write where"),
        ("-gate after_norm -fadd 1", "gated norms have no fadd pre_add_store; use another fadd, or leave gating out"),
        ("-gate after_norm -xbias 1", "gated norms have no x_bias true"),
        ("-group 16", "-group 16 would be ignored: only rows with a -gate are in groups"),
        ("-activation sigmoid", "-activation sigmoid would be ignored: only a -gate and -norm group are"),
    ],
    "run -m=5 -n=130 -bwd=1": [
        ("-fquant=2", "-fquant 2 does not go with -bwd 1: quantised outputs have no gradient"),
        ("-fadd=2", "-fadd 2 does not go with -bwd 1: its sum is not stored; use -fadd 1"),
        ("-save_mv=1", "-save_mv 1 does not go with -bwd 1: mean and rstd are always saved for it"),
        ("-prec_o=fp16", "-prec_o fp16 does not go with -bwd 1"),
    ],
    "run -n=48 -bwd=1": [
        ("-m=21 -samples=3", "-m 21 with -samples 3 is 7 rows a sample", "kernels take 8 or more; pass -m 24, say"),
        ("-m=262152 -samples=32769", "-samples 32769 does not go with -bwd 1, whose kernels take 32768 at most"),
    ],
    "run -norm=group -shape=3x8x5x6 -groups=4": [
        ("-m=3", "-m 3 would be ignored: -norm group takes -shape, -groups, -layout,"),
        ("-fadd=1", "-fadd 1 would be ignored: -norm group takes"),
        ("-save_mv=1", "-save_mv 1 would be ignored: -norm group takes"),
        ("-prec_i=fp8", "-prec_i fp8 does not go with -norm group; pass one of fp16, bf16, fp32"),
        ("-prec_o=int8", "-prec_o int8 does not go with -norm group"),
        ("-bwd=1 -prec_o=fp32", "-prec_o fp32 does not go with -bwd 1"),
        ("-activation=sigmoid", "-activation sigmoid does not go with -norm group; pass one of none, silu"),
        ("-e=nan", "-e nan will not do"),
        ("-group_size=64", "-group_size"),
        ("-scale_ub=1", "-scale_ub"),
        ("-save_unquant=1", "-save_unquant"),
    ],
    "run": [
        ("-norm=group -shape=4", "-shape 4 is no shape; write the sizes of (B, C, ...) as 2x320x64x64"),
        ("-norm=group -shape=2x8x3 -groups=5", "-groups 5 does not divide the 8 channels of -shape 2x8x3"),
        ("-norm=group -shape=2x32", "-shape 2x32 lies in memory as -layout channels_last does"),
        ("-norm=group -shape=2x32x1 -layout=channels_last", "-shape 2x32x1 lies in memory as -layout contiguous does"),
        ("-shape=2x32x1", "-shape 2x32x1 would be ignored: only -norm group reads it"),
        ("-groups=8", "-groups 8 would be ignored: only -norm group reads it"),
        ("-layout=channels_last", "-layout channels_last would be ignored: only -norm group reads it"),
        ("-activation=none -gate=after_norm", "-activation none is none of a gate; pass one of silu, sigmoid"),
    ],
    "run -m=5 -n=300 -prec_i=bf16 -prec_o=fp8": [
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
}


@pytest.mark.parametrize(
    ("argv", "said"),
    [(f"{first} {others}", said) for first, rows in REFUSED.items() for others, *said in rows],
)
def test_a_request_that_cannot_be_carried_out_says_why(
    argv: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(*argv.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [fragment for fragment in said if fragment not in " ".join(printed.err.split())] == []


def test_heads_are_of_a_packed_tensor() -> None:
    """Queries with as many keys and values behind them, on two strides; what is written adjoins."""
    problem = parse(["-m", "12", "-n", "48", "-heads", "4", "-fadd", "1"], "run").problem
    assert isinstance(problem, Problem)
    cpu = torch.device("cpu")
    given, places = inputs(problem, cpu), poisoned_outputs(problem, cpu)
    assert row_stride("x", given["x"]) == RowWalk((3 * 4 * 48, 48), (4,))
    others = {"residual": given["residual"], **places, **gradients_in(problem, cpu)}
    for name, tensor in others.items():
        assert tensor.shape == (3, 4, 48), name
        assert row_stride(name, tensor) == 48


def test_a_kernel_that_takes_other_rows_for_heads_is_told(
    replace_forward: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def ours(x: torch.Tensor, *given: Any, **more: Any) -> LayerNormOutput:
        adjoining = x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))
        return normforge.layernorm2d_fwd(adjoining, *given, **more)

    replace_forward(ours)
    assert status(*HEADS) == 1
    assert "no: y differ from the reference" in capsys.readouterr().out


def test_ck_tiles_other_spellings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = tmp_path / "records.json"
    for json_option in ("-json=1", "-json"):
        assert status(*SMALL, "-fquant=1", "-prec_sx=bf16", json_option, f"-jsonfile={records}") == 0
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[0])["arguments"]["prec_sm"] == "bf16"
    # A record is added to those that are there.
    assert records.read_text() == printed
    assert status(*SMALL, "-json=0", "-jsonfile", str(records)) == 0
    assert capsys.readouterr().out.startswith("problem")
    assert [json.loads(line)["valid"] for line in records.read_text().splitlines()] == [True] * 3


@pytest.mark.parametrize("path", [".", "no/such/folder/records.json", "/dev/null/records.json"])
def test_a_record_that_cannot_be_written_is_refused_first(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*SMALL, "-jsonfile", path) == 2
    assert f"-jsonfile {path} cannot be written; name a file" in capsys.readouterr().err


def test_json_is_one_line_with_everything_a_script_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*SMALL, "-fadd=1", "-y_stride=64", "-json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["arguments"] == {
        "norm": "layer",
        "m": 3,
        "n": 48,
        "heads": 1,
        "samples": 0,
        "strides": {"x": 48, "residual": 48, "y": 64, "residual_out": 48},
        "eps": 1e-5,
        "prec_i": "fp16",
        "prec_o": "fp16",
        "prec_sm": "fp32",
        "prec_sy": "fp32",
        "fadd": "pre_add_store",
        "fquant": "none",
        "x_bias": False,
        "save_mv": False,
        "rounding": "nearest",
        "cast": "after_weight",
        "modulated": False,
        "x_gate": False,
        "gating": "none",
        "gate_activation": "silu",
        "grouped": False,
        "group": 0,
        "group_size": "none",
        "scale_format": "float",
        "scale_layout": "row_major",
        "scale_ub": 0.0,
        "quantise_rounded": False,
        "save_unquant": False,
        "dropout": False,
        "dropout_p": 0.0,
        "backward": False,
        "v": 1,
        "warmup": 5,
        "repeat": 20,
    }
    assert found["instance"] == "ln_fwd_fp16_addst_n128"
    assert found["kernel"] == "ln_fwd_fp16_addst_one_pass"
    assert set(found["versions"]) == {"normforge", "torch", "triton", "python"}
    assert list(found["errors"]) == ["y", "residual_out"]
    assert found["ms"] > 0
    assert found["gb_per_s"] is None
    assert found["interpreted"] is True
    assert found["valid"] is True


def test_epsilon_has_the_apis_default(capsys: pytest.CaptureFixture[str]) -> None:
    for norm, function in (("layer", normforge.layernorm2d_fwd), ("rms", normforge.rmsnorm2d_fwd)):
        default = inspect.signature(function).parameters["eps"].default
        assert parse(["-norm", norm], "run").problem.eps == default
        assert Problem(1, 1, Mode(Norm(norm), DType.FP16, DType.FP16)).eps == default
        assert status("run", "-h") == 0
        assert f"{default:g} with -norm {norm}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("rows", "announced"), [(3, False), (2**19 // 48 + 1, True)])
def test_a_long_wait_in_the_interpreter_is_announced_before_it(
    rows: int, announced: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the kernel is started, on standard error, with what makes the wait shorter."""
    said: list[str] = []

    def instant(problem: Problem, machine: Machine, **keywords: Any) -> Result:
        said.append(capsys.readouterr().err)
        return solve(replace(problem, m=3), machine, **keywords)

    monkeypatch.setattr(run, "solve", instant)
    assert status("run", f"-m={rows}", "-n=48", "-json") == 0
    (before,) = said
    assert (f"m={rows} n=48" in before) == announced
    assert ("a smaller -m" in before) == announced
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_without_validation_nothing_is_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*SMALL, "-v=0", "-kname=0") == 0
    printed = capsys.readouterr().out
    assert "not checked" in printed
    assert "error" not in printed
    assert "ln_fwd" not in printed


def test_a_mismatch_exits_1_and_names_the_output(
    replace_forward: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def off_by_a_tenth(*args: Any, **keywords: Any) -> LayerNormOutput:
        result = normforge.layernorm2d_fwd(*args, **keywords)
        assert result.rstd is not None
        return result._replace(rstd=result.rstd * 1.1)

    replace_forward(off_by_a_tenth)
    assert status(*SMALL, "-save_mv=1") == 1
    assert "no: rstd differ from the reference" in capsys.readouterr().out
    assert status(*SMALL, "-save_mv=1", "-json") == 1
    assert json.loads(capsys.readouterr().out)["valid"] is False


@pytest.mark.parametrize("argv", ["", "-prec_o fp32", "-fquant 2", "-fquant 2 -prec_o fp8", "-fadd 1"])
def test_an_output_left_unwritten_is_a_mismatch(argv: str, replace_forward: Callable[..., None]) -> None:
    def lazy(*args: Any, out: torch.Tensor, residual_out: torch.Tensor | None = None, **keywords: Any) -> Any:
        untouched = out.clone()
        stored = None if residual_out is None else residual_out.clone()
        result = normforge.layernorm2d_fwd(*args, out=out, residual_out=residual_out, **keywords)
        # One output a time is left alone: the sum where there is one.
        return result._replace(y=untouched) if stored is None else result._replace(residual_out=stored)

    replace_forward(lazy)
    assert status(*SMALL, *argv.split()) == 1


def test_an_element_left_unwritten_is_a_mismatch_where_it_would_be_zero(replace_forward: Callable[..., None]) -> None:
    def skips_zeros(*args: Any, out: torch.Tensor, **keywords: Any) -> LayerNormOutput:
        untouched = out.clone()
        result = normforge.layernorm2d_fwd(*args, out=out, **keywords)
        assert (result.y == 0).any()
        return result._replace(y=torch.where(result.y == 0, untouched, result.y))

    replace_forward(skips_zeros)
    assert status("run", "-m", "16", "-n", "64", "-fquant", "2") == 1


@pytest.mark.parametrize("row", [0, -1])
def test_validation_reaches_every_row(
    row: int, replace_forward: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_row_wrong(*args: Any, **keywords: Any) -> LayerNormOutput:
        result = normforge.layernorm2d_fwd(*args, **keywords)
        result.y[row] += 1
        return result

    monkeypatch.setattr(checked_run, "REFERENCE_ELEMENTS", 2 * 48)
    assert status("run", "-m", "5", "-n", "48") == 0
    replace_forward(one_row_wrong)
    assert status("run", "-m", "5", "-n", "48") == 1


def test_the_rate_counts_every_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: dict[str, int] = {}

    def one_millisecond(call: Callable[[], object], **counts: int) -> float:
        timed.update(counts)
        return 1.0

    monkeypatch.setattr(measured_run, "median_ms", one_millisecond)
    mode = replace(
        _FP16,
        dtype_out=DType.INT8,
        scale_dtype=DType.FP16,
        fadd=FusedAdd.PRE_ADD_STORE,
        fquant=FusedQuant.SMOOTH_DYNAMIC,
        x_bias=True,
        save_mv=True,
    )
    problem = Problem(8, 64, mode, strides=Strides.all(80))
    card = Machine(torch.device("cpu"), "a card", interpreted=False)
    result = solve(problem, card, validate=False, warmup=2, repeat=3)
    elements, rows, columns = 8 * 64, 8, 64
    per_element = 2 + 2 + 2 + 1  # x, residual, residual_out, y
    per_column = 2 + 2 + 2 + 4  # weight, bias, x_bias, smooth_scale
    per_row = 2 + 4 + 4  # y_scale, mean, rstd
    moved = per_element * elements + per_column * columns + per_row * rows
    assert result.gb_per_s == pytest.approx(moved / 1e-3 / 1e9)
    assert timed == {"warmup": 2, "repeat": 3}


def test_a_wrong_gradient_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    honest = reference.BACKWARD[Norm.LAYER]

    def spoilt(**operands: Any) -> ReferenceGradients:
        expected = honest(**operands)
        return expected._replace(dweight=expected.dweight * 1.01)

    monkeypatch.setitem(reference.BACKWARD, Norm.LAYER, spoilt)
    assert status(*BACKWARD) == 1
    assert "no: dweight differ from the reference" in capsys.readouterr().out


@pytest.mark.parametrize("name", ModulatedGradients._fields)
def test_a_wrong_gradient_of_modulated_rows_is_a_failure(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest, place = InParts.gradients, ModulatedGradients._fields.index(name)

    def spoilt(*given: Any) -> list[torch.Tensor | None]:
        found = list(honest(*given))
        gradient = found[place]
        assert gradient is not None
        found[place] = gradient.index_fill(-1, torch.tensor([5]), 0.0)
        return found

    monkeypatch.setattr(InParts, "gradients", spoilt)
    assert status(*MODULATED) == 1
    assert f"no: {name} differ from the reference" in capsys.readouterr().out


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
    assert status(*QUANTISED, *argv.split()) == 1
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
    assert {own.get(row.name, row.name) for row in FAMILY.parameters} - beside <= names


def test_demo_agrees_with_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("demo") == 0
    printed = capsys.readouterr().out
    assert "10 of 10 agree" in printed
    assert "GB/s" not in printed


def test_demo_fails_with_its_kernels(replace_forward: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def shifted(*args: Any, **keywords: Any) -> LayerNormOutput:
        result = normforge.layernorm2d_fwd(*args, **keywords)
        return result._replace(y=result.y + 1)

    replace_forward(shifted)
    assert status("demo") == 1
    assert "FAIL: y" in capsys.readouterr().out
