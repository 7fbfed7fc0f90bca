"""`normforge run` and `demo`: what they take, print and find wrong, and what they and other verbs refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge.calls.outputs import LayerNormOutput
from normforge.codegen.model import Mode
from normforge.codegen.values import DType, Norm
from normforge.tools import checked_run, group_run
from normforge.tools.cli import VERBS
from normforge.tools.group_problem import GroupProblem
from normforge.tools.measured_run import Run
from normforge.tools.problem import Problem, Strides
from normforge.tools.run_options import parse

from .command_line import status

_FP16 = Mode(Norm.LAYER, DType.FP16, DType.FP16)

SMALL = ("run", "-m=3", "-n=48")


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
    options = {"m": "10", "n": "1024", "prec_o": "int8", "fquant": "1", "stride": "-1", "e": "1e-6", "norm": "rms"}
    spaced = [word for name, value in options.items() for word in (f"-{name}", value)]
    joined = [f"-{name}={value}" for name, value in options.items()]
    assert parse(spaced, "run") == parse(joined, "run")


# By the arguments that they begin with: the others of each run, its instance, and the outputs that are checked.
RUNS: dict[str, list[tuple[str, ...]]] = {
    "-m=3 -n=48": [
        ("-norm=rms -prec_i=fp32 -save_mv=1", "rms_fwd_fp32_mv_n128", "y rstd"),
        ("-prec_o=fp32 -xbias=1 -save_mv=1", "ln_fwd_fp16_fp32_xb_mv_n128", "y mean rstd"),
        ("-fadd=2 -fquant=2 -prec_o=fp8 -prec_sy=fp16", "ln_fwd_fp16_fp8_e4m3fn_add_dq_sfp16_n128", "y y_scale"),
        ("-fadd=1 -x_stride=50 -xr_stride=51 -y_stride=52 -yr_stride=53", "ln_fwd_fp16_addst_n128", "y residual_out"),
        ("-fadd=3 -xr_stride=51 -prec_o=fp32", "ln_fwd_fp16_fp32_postadd_n128", "y"),
        ("-norm=rms -fquant=1 -prec_sm=fp16 -prec_o=fp8_e4m3fnuz", "rms_fwd_fp16_fp8_e4m3fnuz_sdq_n128", "y y_scale"),
        ("-fquant=2 -rounding=truncate", "ln_fwd_fp16_int8_dq_trunc_n128", "y y_scale"),
        ("-prec_i=fp8 -fadd=1 -save_mv=1", "ln_fwd_fp8_e4m3fn_bf16_addst_mv_n128", "y residual_out mean rstd"),
        ("-norm=rms -prec_i=bf16 -cast=before_weight -bwd=1", "rms_bwd_bf16_cbw_n128", "dx dweight"),
    ],
    "-m=6 -n=48 -samples=2": [
        ("", "ln_fwd_fp16_mod_n128", "y"),
        ("-fadd=1 -xgate=1 -prec_o=fp32 -xr_stride=50", "ln_fwd_fp16_fp32_xg_addst_mod_n128", "y residual_out"),
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
        ("-gate=after_norm -bwd=1 -group=24", "ln_bwd_fp16_ga_grp_n128", "dx dgate dweight dbias"),
    ],
    "-m=9 -n=48 -heads=3": [
        ("-norm=rms -prec_i=bf16 -save_mv=1", "rms_fwd_bf16_mv_n128", "y rstd"),
        ("-fadd=1 -fquant=1 -xr_stride=200 -y_stride=150", "ln_fwd_fp16_int8_addst_sdq_n128", "y residual_out y_scale"),
        ("-fadd=4 -fquant=2 -save_mv=1", "ln_fwd_fp16_int8_postaddnorm_dq_mv_n128", "y residual_out y_scale mean rstd"),
        ("-fadd=1 -xbias=1 -bwd=1", "ln_bwd_fp16_xb_addst_n128", "dx dweight dbias dx_bias"),
    ],
    "-m=5 -n=130 -bwd=1": [
        ("-norm=layer", "ln_bwd_fp16_n256", "dx dweight dbias"),
        ("-norm=rms -prec_i=bf16", "rms_bwd_bf16_n256", "dx dweight"),
        ("-xbias=1 -norm=rms", "rms_bwd_fp16_xb_n256", "dx dweight dx_bias"),
        ("-dropout=0.3 -fadd=1", "ln_bwd_fp16_drop_addst_n256", "dx dweight dbias ddropped"),
        ("-dropout=0.3 -fadd=1 -xbias=1 -norm=rms", "rms_bwd_fp16_xb_drop_addst_n256", "dx dweight dx_bias ddropped"),
        ("-x_stride=150 -y_stride=140", "ln_bwd_fp16_n256", "dx dweight dbias"),
    ],
    "-m=27 -n=48 -samples=3 -bwd=1": [
        ("", "ln_bwd_fp16_mod_n128", "dx dscale dshift dweight dbias"),
        ("-norm=rms -fadd=1 -stride=60", "rms_bwd_fp16_addst_mod_n128", "dx dscale dshift dresidual dweight"),
        (
            "-fadd=1 -xgate=1 -prec_i=bf16 -x_stride=56",
            "ln_bwd_bf16_xg_addst_mod_n128",
            "dx dscale dshift dgate dresidual dweight dbias",
        ),
    ],
    "-norm=group -shape=3x8x5x6 -groups=4": [
        ("", "gn_fwd_fp16_n128", "y"),
        ("-activation=silu -layout=channels_last -prec_i=bf16 -e=0.1", "gn_fwd_bf16_silu_cl_n128", "y"),
        ("-bwd=1 -activation=silu", "gn_bwd_fp16_silu_n128", "dx dweight dbias"),
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
            "-prec_o=fp4_e2m1fn -fquant=1 -group_size=16 -scale_format=e4m3 -scale_layout=swizzled_128x4",
            "ln_fwd_bf16_fp4_e2m1fn_sdq_g16_e4m3_swz_n512",
            "y_scale y",
        ),
        ("-prec_o=fp8 -norm=rms -fquant=4 -x_stride=400", "rms_fwd_bf16_fp8_e4m3fn_scq_n512", "y"),
        ("-prec_o=fp8 -norm=rms -fquant=2 -scale_ub=0.2", "rms_fwd_bf16_fp8_e4m3fn_dq_ub_n512", "y_scale y"),
    ],
}


STRIDES = {"x_stride": "x", "xr_stride": "residual", "y_stride": "y", "yr_stride": "residual_out"}


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
    assert (found["valid"], found["interpreted"], found["gb_per_s"]) == (True, True, None)
    said = dict(word.lstrip("-").split("=") for word in argv.split())
    taken = found["arguments"] | {
        name: found["arguments"]["strides"][of] for name, of in STRIDES.items() if name in said
    }
    for name in ("group_size", "scale_layout", "scale_format", "scale_ub", *STRIDES):
        assert name not in said or str(taken[name]) == said[name]


# By the arguments that they begin with: the others, and what is said of each.
REFUSED: dict[str, list[tuple[str, ...]]] = {
    "": [
        ("run -q 1", "no option -q", "normforge run -h"),
        ("run -rep 3", "no option -rep", "did you mean -repeat"),
        ("run -prec_i fp64", "-prec_i", "'fp64'", "bf16"),
        ("run -m 0", "-m 0", "at least 1"),
        ("run -e nan", "-e nan", "finite"),
        ("run -n 64 -stride 48", "-stride 48", "-n 64", "at least 64"),
        ("run -m 10 -heads 4", "-m 10", "-heads 4", "a multiple, 12 say"),
        ("run -m 8 -n 64 -heads 4 -x_stride 255", "-x_stride 255", "-heads 4 of -n 64", "at least 256"),
        ("run -prec_sm fp16", "-prec_sm fp16 would be ignored", "-fquant 1"),
        ("run -xr_stride 4096", "-xr_stride 4096 would be ignored", "-fadd 1 to 4"),
        ("run -prec_o int8", "-prec_o int8", "-fquant 0", "fp16, bf16, fp32", "-fquant 1 or -fquant 2"),
        ("run -fquant 2 -prec_o fp16", "-prec_o fp16", "-fquant 2", "int8, fp8", "or -fquant 0"),
        ("run -prec_i fp8 -bwd 1", "-prec_i fp8 does not go with -bwd 1", "norms of fp8 have no gradient"),
        ("run -m 3328 -m=3", "argument -m: it is given twice; keep one of the two"),
        # The first is the default, and none the less given.
        ("run -v=1 -v 0", "argument -v: it is given twice; keep one of the two"),
        ("list --arch sm_90 --arch sm_80", "argument --arch: it is given twice; keep one of the two"),
        ("generate --out a --out b", "argument --out: it is given twice; keep one of the two"),
        ("list --arch sm90", "is no architecture; write one like sm_90 or gfx942, or leave --arch out"),
        ("list nonsense*", "no instance matches 'nonsense*'; normforge list without a glob prints every name"),
        ("tune --only fwd_8bit", "--only 'fwd_8bit' matches no class; they are fwd_16bit, fwd_16bit_rms, fwd_"),
        ("tune --n 4k", "--n '4k' is no row length; write whole numbers from 1"),
        ("tune --sizes huge", "--sizes 'huge' is no size of M; they are large, small, invariant, some"),
        ("tune --sizes some", "--sizes keeps a table's other tiles; name one that is there with --out FILE"),
        ("tune --minutes nan", "--minutes nan is no time; write a number above 0, 30 or 0.5, say"),
        ("tune --resume", "--resume goes on with what a run wrote; name that with --out FILE, or with --report FILE"),
        ("warmup ln_fwd_bf16", "there are no sizes; pass row lengths, --n 4096 say, or --shape"),
        ("warmup --n 64,x", "'64,x' is no list of whole numbers from 1"),
        ("list ln_fwd_fp61_*", "'ln_fwd_fp61_*'", "nearest", "ln_fwd_fp16_"),
        ("bench", "no verb 'bench'", ", ".join(VERBS)),
        ("", "a verb is needed", ", ".join(VERBS)),
    ],
    "warmup --n 64": [
        ("--weight int8", "'int8' is none of same, fp16, bf16, fp32, none"),
        ("--residual none", "'none' is none of same, fp16, bf16, fp32"),
        ("--rows all", "'all' is none of few, some, many, most"),
        ("--row-stride 6144x", "'6144x' is no stride, or strides with the rows between them"),
        ("--row-stride x=y", "'y' is no stride, or strides with the rows between them"),
        ("--jobs 0", "'0' is no number of threads"),
        ("--arch sm_90", "--arch sm_90 goes with --list"),
        ("--list --arch sm_90 --manifest m ln_fwd_bf16", "leave one of them out"),
    ],
    "warmup --list --arch sm_90 --recorded r.yaml": [
        ("--n 64", "--n is given beside --recorded, and recordings say what calls bring; leave one out"),
        ("--weight fp32", "--weight is given beside --recorded"),
        ("--manifest m.yaml", "--manifest is given beside --recorded"),
        ("ln_fwd_bf16", "modes are given beside --recorded"),
    ],
    "run -m=6 -n=48": [
        ("-samples 4", "-m 6 rows are no whole number of rows a sample with -samples 4"),
        (
            "-samples 2 -bwd 1",
            "-m 6 with -samples 2 is 3 rows a sample, and the backward kernels take 8 or more; pass -m 16,",
        ),
        ("-samples 2 -y_stride 60", "-y_stride 60 does not go with -samples 2: they write where they allocate"),
        ("-xgate 1", "-xgate 1 would be ignored: only rows of -samples are gated"),
        ("-samples 2 -xgate 1", "x_gate scales x before a residual is added to it, and fadd is none"),
        ("-gate after_norm -group 7", "-group 7 does not divide -n 48"),
        ("-gate after_norm -fadd 1", "gated norms have no fadd pre_add_store; use another fadd, or leave gating out"),
        ("-group 16", "-group 16 would be ignored: only rows with a -gate are in groups"),
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
    ],
    "run": [
        ("-norm=group -shape=4", "-shape 4 is no shape; write the sizes of (B, C, ...) as 2x320x64x64"),
        ("-norm=group -shape=2x8x3 -groups=5", "-groups 5 does not divide the 8 channels of -shape 2x8x3"),
        ("-norm=group -shape=2x32", "-shape 2x32 lies in memory as -layout channels_last does"),
    ],
    "run -m=5 -n=300 -prec_i=bf16 -prec_o=fp8": [
        (
            "-fquant=2 -scale_layout=column_major",
            "-scale_layout column_major would be ignored: only scales of -group_si",
        ),
        ("-fquant=2 -scale_ub=-1", "-scale_ub -1.0 will not do; it takes a finite number above 0, or 0 for no bound"),
        ("-fquant=3 -prec_sy=bf16", "-prec_sy bf16 would be ignored: only -fquant 1 and 2 write a scale"),
        ("-fquant=3 -group_size=64", "fquant static takes its scales from the caller"),
        ("-fquant=2 -group_size=64 -y_stride=400", "-y_stride 400 does not go with norms of quantised_layer_norm"),
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


def prepared(argv: str) -> Run[Any]:
    problem = parse(argv.split(), "run").problem
    prepare: Callable[..., Run[Any]] = group_run.prepare if isinstance(problem, GroupProblem) else checked_run.prepare
    return prepare(problem, torch.device("cpu"))


def flip(tensor: torch.Tensor) -> None:
    """Change the last number of a tensor by much; a second flip changes it back."""
    last = tensor[(-1,) * tensor.dim()].reshape(1).view(torch.uint8)
    last[-1] ^= 0x40


WRONG = [
    "-m=5 -n=48 -fadd=1 -fquant=1 -save_mv=1",
    "-m=5 -n=48 -norm=rms -heads=5",
    "-m=6 -n=48 -samples=3 -xgate=1 -fadd=1",
    "-m=6 -n=48 -gate=after_norm -save_mv=1",
    "-m=5 -n=300 -prec_i=bf16 -prec_o=fp8 -fquant=2 -group_size=128 -scale_layout=column_major -save_unquant=1",
    "-m=5 -n=130 -xbias=1 -bwd=1",
    "-m=5 -n=130 -dropout=0.3 -fadd=1 -bwd=1",
    "-m=27 -n=48 -samples=3 -fadd=1 -xgate=1 -bwd=1",
    "-m=6 -n=48 -gate=before_norm -bwd=1",
    "-norm=group -shape=3x8x5x6 -groups=4 -prec_i=fp32",
    "-norm=group -shape=3x8x5x6 -groups=4 -prec_i=fp32 -bwd=1",
]


@pytest.mark.parametrize("argv", WRONG)
def test_one_wrong_number_of_any_output_is_found(argv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of a tensor, where the reference takes rows and samples by turns."""
    for module in (checked_run, group_run):
        monkeypatch.setattr(module, "REFERENCE_ELEMENTS", 1)
    run = prepared(argv)
    outputs = run.call()
    names = {finding.name for finding in run.validate(outputs)}
    assert all(finding.ok for finding in run.validate(outputs))
    found: set[str] = set()
    for tensor in (output for output in outputs if output is not None):
        flip(tensor)
        wrong = {finding.name for finding in run.validate(outputs) if not finding.ok}
        assert wrong
        found |= wrong
        flip(tensor)
    assert found == names


@pytest.mark.parametrize(
    ("argv", "moved"),
    [
        # Of x, residual, residual_out and y; of weight, bias, x_bias and smooth_scale; of y_scale, mean and rstd.
        (
            "-m=8 -n=64 -stride=80 -fadd=1 -fquant=1 -prec_sy=fp16 -xbias=1 -save_mv=1",
            8 * 64 * (2 + 2 + 2 + 1) + 64 * (2 + 2 + 2 + 4) + 8 * (2 + 4 + 4),
        ),
        ("-norm=group -shape=3x8x5x6 -groups=4 -prec_o=fp32", 3 * 8 * 30 * (2 + 4) + 2 * 8 * 2),
    ],
)
def test_the_rate_counts_every_tensor_once(argv: str, moved: int) -> None:
    run = prepared(argv)
    assert run.moved(run.call()) == moved


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
