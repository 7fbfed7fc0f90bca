"""The `normforge` command: its arguments, what it prints, and its exit status."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge.calls.outputs import LayerNormOutput
from normforge.calls.row_layout import row_stride
from normforge.codegen import cli as generator
from normforge.codegen.model import Mode
from normforge.codegen.values import Cast, DType, FusedAdd, FusedQuant, Norm, Rounding
from normforge.kernels.strides import RowWalk
from normforge.selection import dispatch
from normforge.selection.table import load_folder
from normforge.tools import checked_run, list_instances, measured_run, run
from normforge.tools.checked_run import solve
from normforge.tools.cli import VERBS, main
from normforge.tools.machine import Machine
from normforge.tools.measured_run import Result
from normforge.tools.problem import Problem, Strides
from normforge.tools.problem_tensors import gradients_in, inputs, poisoned_outputs
from normforge.tools.run_options import parse

from ..calling import printed, python
from ..some_rows import SomeTable
from ..thorough import first_of_each

_FP16 = Mode(Norm.LAYER, DType.FP16, DType.FP16)

SMALL = ["run", "-m", "3", "-n", "48"]


def status(*argv: str) -> int:
    """The exit status of a command line, whether it is returned or raised by argparse."""
    try:
        return main(argv)
    except SystemExit as stop:
        return int(str(stop.code))


def command(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line in a process of its own, where no GPU is to be seen and only `environment` speaks of Triton."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "normforge", *argv],
        env=inherited | hidden | environment,
        capture_output=True,
        text=True,
        check=False,
    )


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


@pytest.mark.parametrize(
    ("argv", "fragments"),
    [
        ("run -q 1", ["no option -q", "normforge run -h"]),
        ("run -rep 3", ["no option -rep", "did you mean -repeat"]),
        ("run -prec_i fp64", ["-prec_i", "'fp64'", "bf16"]),
        ("run -m ten", ["-m", "'ten'"]),
        ("run -m 0", ["-m 0", "at least 1"]),
        ("run -repeat 0", ["-repeat 0", "at least 1"]),
        ("run -e nan", ["-e nan", "finite"]),
        ("run -n 64 -stride 48", ["-stride 48", "-n 64", "at least 64"]),
        ("run -n 64 -y_stride 0", ["-y_stride 0", "-n 64"]),
        ("run -heads 0", ["-heads 0", "at least 1"]),
        ("run -m 10 -heads 4", ["-m 10", "-heads 4", "a multiple, 12 say"]),
        ("run -m 8 -n 64 -heads 4 -x_stride 255", ["-x_stride 255", "-heads 4 of -n 64", "at least 256"]),
        ("run -prec_sm fp16", ["-prec_sm fp16 would be ignored", "-fquant 1"]),
        ("run -fquant 2 -prec_sm fp16", ["-prec_sm fp16 would be ignored"]),
        ("run -prec_sy fp32", ["-prec_sy fp32 would be ignored"]),
        ("run -xr_stride 4096", ["-xr_stride 4096 would be ignored", "-fadd 1 and 2"]),
        ("run -fadd 2 -yr_stride 4096", ["-yr_stride 4096 would be ignored", "-fadd 1"]),
        ("run -prec_o int8", ["-prec_o int8", "-fquant 0", "fp16, bf16, fp32", "-fquant 1 or -fquant 2"]),
        ("run -fquant 2 -prec_o fp16", ["-prec_o fp16", "-fquant 2", "int8, fp8", "or -fquant 0"]),
        ("run -prec_i fp8 -bwd 1", ["-prec_i fp8 does not go with -bwd 1", "norms of fp8 have no gradient"]),
        ("run -prec_i fp8_e4m3fnuz", ["-prec_i", "'fp8_e4m3fnuz'", "fp8_e5m2"]),
        ("run 10", ["10"]),
        ("list --all", ["--all"]),
        ("list ln_fwd_fp61_*", ["'ln_fwd_fp61_*'", "nearest", "ln_fwd_fp16_"]),
        ("demo fast", ["fast"]),
        ("bench", ["no verb 'bench'", ", ".join(VERBS)]),
        ("", ["a verb is needed", ", ".join(VERBS)]),
    ],
)
def test_a_request_that_cannot_be_carried_out_says_why(
    argv: str, fragments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(*argv.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [fragment for fragment in fragments if fragment not in printed.err] == []


@pytest.mark.parametrize("argv", [["-h"], *([verb, "-h"] for verb in VERBS)], ids=" ".join)
def test_help_is_printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*argv) == 0
    assert capsys.readouterr().out.startswith("usage: normforge")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--version") == 0
    assert capsys.readouterr().out == f"{normforge.__version__}\n"


def test_the_command_of_ck_tiles_readme(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("run", "-m=10", "-n=1024", "-prec_o=int8", "-fquant=1", "-fadd=1") == 0
    words = capsys.readouterr().out.split()
    assert "ln_fwd_fp16_int8_addst_sdq_n1024" in words
    assert "ln_fwd_fp16_int8_addst_sdq_one_pass" in words
    assert {"y", "residual_out", "y_scale"} <= set(words)
    assert words[-2:] == ["valid", "yes"]
    assert "GB/s" not in words


@pytest.mark.parametrize(
    "argv",
    [
        "-norm rms -prec_i fp32 -save_mv 1",
        "-prec_o fp32 -xbias 1 -save_mv 1",
        "-fadd 2 -fquant 2 -prec_o fp8 -prec_sy fp16",
        "-fadd 1 -x_stride 50 -xr_stride 51 -y_stride 52 -yr_stride 53",
        "-norm rms -fquant 1 -prec_sm fp16 -prec_o fp8_e4m3fnuz",
        "-fquant 2 -rounding truncate",
        "-prec_i fp8 -fadd 1 -save_mv 1",
        "-norm rms -prec_i fp8_e5m2 -prec_o fp8 -fquant 1 -x_stride 50",
        "-norm rms -prec_i bf16 -prec_o fp32 -cast before_weight",
        "-norm rms -prec_i bf16 -cast before_weight -bwd 1",
    ],
)
def test_a_run_agrees_with_the_reference(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*SMALL, *argv.split()) == 0
    assert capsys.readouterr().out.split()[-1] == "yes"


SAMPLES = ["run", "-m", "6", "-n", "48", "-samples", "2"]


@pytest.mark.parametrize(
    "argv",
    [
        "",
        "-norm rms -prec_i bf16 -save_mv 1 -x_stride 60",
        "-fadd 1 -xgate 1 -prec_o fp32 -xr_stride 50",
        "-fquant 2 -save_mv 1",
        "-norm rms -prec_i bf16 -fadd 1 -xgate 1 -fquant 2 -prec_o fp8",
    ],
)
def test_a_run_of_modulated_rows_agrees_with_the_reference(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*SAMPLES, *argv.split()) == 0
    printed = capsys.readouterr().out
    assert "_mod" in printed
    assert printed.split()[-1] == "yes"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
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
    ],
)
def test_what_samples_do_not_go_with(argv: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("run", "-m", "6", "-n", "48", *argv.split()) == 2
    assert problem in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("argv", "instance"),
    [
        ("-gate after_norm", "ln_fwd_fp16_ga_n128"),
        ("-gate before_norm -norm rms -prec_i bf16 -save_mv 1 -group 16", "rms_fwd_bf16_gb_grp_mv_n128"),
        ("-gate after_norm -activation sigmoid -fquant 2 -x_stride 60", "ln_fwd_fp16_int8_ga_sig_dq_n128"),
        ("-gate after_norm -heads 3 -norm rms", "rms_fwd_fp16_ga_n128"),
        ("-gate after_norm -bwd 1 -group 24", "ln_bwd_fp16_ga_grp_n128"),
        ("-gate before_norm -bwd 1 -norm rms -activation sigmoid -prec_i bf16", "rms_bwd_bf16_gb_sig_n128"),
    ],
)
def test_a_run_of_gated_rows_agrees_with_the_reference(
    argv: str, instance: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("run", "-m", "6", "-n", "48", *argv.split()) == 0
    printed = capsys.readouterr().out
    assert f" {instance}\n" in printed
    assert printed.split()[-1] == "yes"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
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
)
def test_what_a_gate_does_not_go_with(argv: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("run", "-m", "6", "-n", "48", *argv.split()) == 2
    assert problem in " ".join(capsys.readouterr().err.split())


HEADS = ["run", "-m", "9", "-n", "48", "-heads", "3"]


@pytest.mark.parametrize(
    "argv",
    [
        "-norm rms -prec_i bf16 -save_mv 1",
        "-fadd 1 -fquant 1 -xr_stride 200 -y_stride 150",
        "-prec_i fp8 -fadd 1",
        "-fadd 1 -xbias 1 -bwd 1",
        "-norm rms -xbias 1 -y_stride 190 -bwd 1",
    ],
)
def test_a_run_of_heads_agrees_with_the_reference(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*HEADS, *argv.split()) == 0
    printed = capsys.readouterr().out
    assert "m=9 n=48 heads=3, strides 432 and 48" in printed
    assert printed.split()[-1] == "yes"


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


def test_list_prints_every_instance(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("list") == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if " " in line}
    assert {entry.name for entry in normforge.instances()} <= listed


@pytest.fixture
def plain_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """A table of plain norms, whatever instances.yaml has."""
    manifest, folder = tmp_path / "plain.yaml", tmp_path / "plain"
    manifest.write_text(
        "groups:\n  plain:\n    norm: [layer, rms]\n    dtype_in: [fp16, bf16]\n    n: [n1024, n4096]\n"
    )
    assert generator.main(["--manifest", str(manifest), "--out", str(folder)]) == 0
    capsys.readouterr()
    with dispatch.using(load_folder(folder)):
        yield


@pytest.mark.usefixtures("plain_table")
def test_list_has_a_column_for_some_rows_where_they_have_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    with dispatch.using(SomeTable(dispatch.loaded())):
        assert status("list", "ln_fwd_fp16_n4096") == 0
    head, _, row, *_ = [re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert head[2:] == ["more than 2048 rows", "257 to 2048 rows", "256 rows or fewer", "batch invariant"]
    assert [words.rpartition(" on ")[2] for words in row[2:]] == ["4 warps", "8 warps", "8 warps", "4 warps"]


@pytest.mark.usefixtures("plain_table")
def test_list_takes_globs(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("list", "ln_fwd_fp16_n4096", "rms_fwd_bf16_n1024") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["ln_fwd_fp16_n4096", "rms_fwd_bf16_n1024"]
    (entry,) = (each for each in normforge.instances() if each.name == "ln_fwd_fp16_n4096")
    assert f"{entry.first}..{entry.last}" in lines[2]
    assert "one_pass 1×1024 on 4 warps" in lines[2]
    assert "rows 2×1024 on 1 warp " in lines[3]
    assert lines[-1] == f"2 of {len(normforge.instances())} instances"


@pytest.mark.parametrize("arch", ["foo", "sm90", "h200", "", "sm_90\n"])
def test_list_takes_no_architecture_that_is_none(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = normforge.instances()[0].name
    assert status("list", "--arch", arch, name) == 2
    assert "is no architecture; write one like sm_90 or gfx942, or leave --arch out" in capsys.readouterr().err
    for known in ("sm_90", "sm_80", "gfx942", "any"):
        assert status("list", "--arch", known, name) == 0


TWICE = {
    "out": ["generate", "--out", "a", "--out", "b"],
    "tiles": ["generate", "--tiles", "a", "--tiles", "b"],
    "arch": ["list", "--arch", "sm_90", "--arch", "sm_80"],
    "n": ["warmup", "--n", "64", "--n", "128", "--list"],
    "weight": ["aot", "--n", "64", "--weight", "fp32", "--weight", "fp32", "--arch", "sm_90", "--out", "x"],
    "only": ["tune", "--only", "fwd*", "--only", "bwd*"],
    "m": ["run", "-m", "3328", "-m=3"],
    # The first is the default, and none the less given.
    "v": ["run", "-v=1", "-v", "0"],
}


@pytest.mark.parametrize(("name", "argv"), TWICE.items(), ids=TWICE)
def test_an_option_given_twice_is_refused(name: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*argv) == 2
    dashes = "-" if argv[0] == "run" else "--"
    assert capsys.readouterr().err.endswith(f"error: argument {dashes}{name}: it is given twice; keep one of the two\n")


def interrupt(*_: object, **__: object) -> int:
    raise KeyboardInterrupt


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(list_instances, "main", interrupt)
    assert status("list") == 130
    assert capsys.readouterr().err == "normforge list: interrupted\n"
    monkeypatch.setattr(generator, "render_folder", interrupt)
    assert status("generate", "--manifest", "instances.yaml", "--out", "nowhere") == 130
    assert capsys.readouterr().err == "normforge generate: interrupted\n"


def test_ctrl_c_waits_for_no_compilation(tmp_path: Path) -> None:
    """Each takes seconds; here a stand-in for a compilation takes a minute."""
    code = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # Whatever started the tests may ignore it.
sys.argv = ["normforge", "aot", "--arch", "gfx942", "--n", "64", "--jobs", "2", "--out", "kernels", "ln_fwd_bf16"]
from normforge.ahead_of_time import build
def slow(*_):
    print("compiling", flush=True)
    time.sleep(60)
build._compile = slow
from normforge.tools.cli import main
sys.exit(main())
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["compiling\n"] * 2
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate()
        assert time.monotonic() - start < 5
    assert process.returncode == 130
    assert complaint.endswith("normforge aot: interrupted\n")
    assert "Traceback" not in complaint
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == ["index.json"]
    assert json.loads((tmp_path / "kernels" / "index.json").read_text())["kernels"] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full to stand for a full disk")
def test_a_list_onto_a_full_disk_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "normforge", "list"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr == "normforge list: error: [Errno 28] No space left on device; mend that and run again\n"


@pytest.mark.parametrize(("target", "instead"), [("test-gpu", "make test-all"), ("bench", "make demo")])
def test_without_a_gpu_make_says_so_in_one_sentence(
    target: str, instead: str, repository: Path, tmp_path: Path
) -> None:
    places = {name: tmp_path / name for name in ("RUNTIME", "READY")}
    for path in places.values():
        path.touch()
    done = subprocess.run(
        ["make", "-s", target, f"BIN={Path(sys.executable).parent}", *(f"{name}={at}" for name, at in places.items())],
        cwd=repository,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert (done.stdout, done.stderr.splitlines()[0]) == (
        "",
        f"make {target} needs a GPU, and torch finds none here; what runs without one: {instead}",
    )


def test_list_into_a_reader_that_stops_early_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "normforge", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        complaint = process.stderr.read()
    assert (process.returncode, complaint) == (0, b"")


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


def test_without_a_gpu_the_interpreter_is_turned_on_and_announced() -> None:
    done = command(*SMALL)
    assert done.returncode == 0, done.stderr
    assert "Triton's CPU interpreter" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "GB/s" not in done.stdout


def test_without_a_gpu_and_with_the_interpreter_forbidden_nothing_runs() -> None:
    done = command(*SMALL, TRITON_INTERPRET="0")
    assert done.returncode == 2
    assert "TRITON_INTERPRET=0" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("verb", [["run", "-m=64", "-n=4096", "-json"], ["demo"]], ids=["run", "demo"])
def test_on_a_gpu_kernels_are_compiled_and_timed(verb: list[str]) -> None:
    done = command(*verb, CUDA_VISIBLE_DEVICES="0", HIP_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.cuda.get_device_name(0) in done.stdout
    assert "interpreter" not in done.stdout + done.stderr
    if verb[0] == "run":
        assert json.loads(done.stdout)["gb_per_s"] > 0
    else:
        assert "GB/s" in done.stdout


REFUSED = [
    *([verb, "--nonsense"] for verb in VERBS),
    ["run", "-norm", "group", "-groups", "7"],
    ["warmup"],
    ["warmup", "--n", "64", "--row-stride", "weight=80"],
    ["aot", "--n", "64", "--out", "kernels"],
    ["aot", "--n", "64", "--arch", "sm_90"],
    ["aot", "--n", "64", "--arch", "sm_90", "--out", "kernels", "--weight", "fp61"],
    ["list", "nonsense"],
    ["hub", "file"],
    ["backendbench", "file"],
]
# Arguments that the parser takes, and a table, a file or an architecture refuses.
AOT = ["aot", "--out", "kernels", "--arch"]
REFUSED_LATER = [
    [*AOT, "sm_9000000000", "--n", "64"],
    [*AOT, "sm_90", "--n", "64", "--multiprocessors", "0"],
    [*AOT, "gfx942", "--n", "64", "--for", "jax"],
    [*AOT, "sm_90", "--n", "64", "nonsense"],
    [*AOT, "sm_90", "--n", "64", "--manifest", "no.yaml"],
    [*AOT, "sm_90", "--n", "64", "--instances", "none"],
    [*AOT, "sm_90", "--recorded", "no.yaml"],
    ["warmup", "--list", "--arch", "nonsense", "--n", "64"],
    ["warmup", "--n", "64", "gn_fwd_bf16"],
    ["warmup", "--shape", "2x3/7"],
    ["warmup", "--n", "64"],
    ["tune"],
    ["merge", "no.yaml", "--out", "merged.yaml"],
    ["generate", "--manifest", "no.yaml"],
    ["aot", "--out", "file", "--arch", "sm_90", "--n", "64"],
]


ANSWERED = [*([verb, "-h"] for verb in VERBS), *REFUSED, *REFUSED_LATER]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Return status and text of each command of `ANSWERED`, run in one process that cannot import torch."""
    code = f"""
import contextlib, io, os, pathlib, sys
sys.modules["torch"] = None  # Importing it now fails.
sys.argv = ["normforge"]
os.chdir({str(tmp_path_factory.mktemp("answers"))!r})
pathlib.Path("file").touch()
from normforge.tools import cli, driver
driver.is_missing = lambda: True
found = {{}}
for argv in {ANSWERED!r}:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = cli.main(argv)
        except SystemExit as stop:
            status = stop.code
    found[str(argv)] = status, said.getvalue()
print(found)
"""
    found: dict[str, tuple[int, str]] = ast.literal_eval(printed(code, TRITON_INTERPRET=None))
    return found


@pytest.mark.parametrize("argv", ANSWERED, ids=str)
def test_help_and_refusals_import_no_torch(argv: list[str], answers: dict[str, tuple[int, str]]) -> None:
    """Importing torch takes from 3 seconds to half a minute."""
    status, said = answers[str(argv)]
    assert status == (0 if "-h" in argv else 2), said
    assert (f"normforge {argv[0]}: error: " if argv in REFUSED_LATER else f"usage: normforge {argv[0]}") in said


# Of each module of parsers one is timed in the quick half.
TIMED = [argv for argv in ANSWERED if "-h" in argv or argv[0] in ("aot", "list", "backendbench")]


@pytest.mark.parametrize("argv", first_of_each(TIMED, lambda argv: VERBS[argv[0]].parser.partition(":")[0], str))
def test_help_and_refusals_take_half_a_second(
    argv: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of the processor, because tests share the cores. The first try compiles all files to bytecode."""
    (tmp_path / "file").touch()
    code = f"""
import atexit, os, sys, time
os.chdir({str(tmp_path)!r})
atexit.register(lambda: print(time.process_time()))
sys.argv = ["normforge"]
from normforge.tools.cli import main
sys.exit(main({argv!r}))
"""
    kept = str(tmp_path_factory.getbasetemp() / "bytecode")
    bytecode: dict[str, str | None] = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": kept}
    assert any(float(python(code, **bytecode).stdout.split()[-1]) < 0.5 for _ in range(5))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("normforge ", set(VERBS)),
        ("normforge wa", {"warmup"}),
        ("normforge run -prec_i b", {"bf16"}),
        ("normforge run -war", {"-warmup"}),
        ("normforge tune --res", {"--resume"}),
        ("normforge aot --ar", {"--arch"}),
        ("normforge generate --man", {"--manifest"}),
        ("normforge generate --manifest mi", {"mine.yaml"}),
    ],
)
def test_bash_completes(line: str, expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").touch()
    assert status("completion", "bash") == 0
    words = line.split(" ")
    asked = f"COMP_WORDS=({' '.join(words[:-1])} '{words[-1]}'); COMP_CWORD={len(words) - 1}"
    script = f"{capsys.readouterr().out}\n{asked}\n_shtab_normforge\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert expected <= set(done.stdout.split()), done.stderr
    if words[-1]:
        assert set(done.stdout.split()) == expected


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("completion", shell) == 0
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in VERBS)


def test_what_is_near_no_name_has_no_suggestions(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("list", "nonsense*") == 2
    assert capsys.readouterr().err.endswith(
        "no instance matches 'nonsense*'; normforge list without a glob prints every name\n"
    )
