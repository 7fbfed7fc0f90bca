"""On a card: what was compiled before, by warm-up or ahead of time, is all that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import normforge
from normforge.kernels.gpu import target_of
from normforge.upstream import triton_launcher

from ..calling import ORACLE, agree, printed, python

pytestmark = pytest.mark.gpu

# A training step and a quantised forward pass, for few rows and for many; a row of 16384 is spread over programs that
# wait for one another.
LENGTHS = "96,16384"
CALLS = """
import torch, normforge
from proving.cases import cases, check, operands
def run(lengths=(96, 16384), dtype=torch.bfloat16):
    for m, n in ((m, n) for n in lengths for m in (3, 700)):
        at = {"dtype": torch.bfloat16, "vectors": dtype, "without": ("residual", "x_bias")}
        (case,) = cases("plain", vary=(), shape=(m, n), **at)
        given = operands(case, "cuda")
        check(case, given)
        x, weight = given["x"].detach(), given["weight"].detach()
        out = normforge.rmsnorm2d_fwd(x, weight, fquant="dynamic", out_dtype=torch.float8_e4m3fn)
        wanted = torch.nn.functional.rms_norm(x.float(), (n,), weight.float(), 1e-6)
        torch.testing.assert_close(out.y.float() * out.y_scale[:, None], wanted, rtol=7e-2, atol=7e-2)
    torch.cuda.synchronize()
"""
MODES = ("ln_fwd_bf16_mv", "ln_bwd_bf16", "rms_fwd_bf16_fp8_e4m3fn_dq")

# A line for each kernel that Triton compiles (False) or takes from its cache (True).
LISTENER = """
from triton import knobs
knobs.compilation.listener = lambda **given: print("compiled", given["cache_hit"], given["src"].name)
"""


def command(*argv: str) -> str:
    return f"from normforge.tools.cli import main; raise SystemExit(main({list(argv)!r}))"


def test_after_the_command_another_process_compiles_nothing(tmp_path: Path) -> None:
    cache = str(tmp_path)
    assert "kernels are compiled" in printed(command("warmup", "--n", LENGTHS, *MODES), TRITON_CACHE_DIR=cache)
    told = printed(f"{CALLS}{LISTENER}run()", TRITON_CACHE_DIR=cache, NORMFORGE_FROZEN="1").splitlines()
    assert told
    assert {line.split()[1] for line in told} == {"True"}
    other = python(f"{CALLS}run(dtype=torch.float32)", TRITON_CACHE_DIR=cache, NORMFORGE_FROZEN="1")
    assert other.returncode != 0
    assert "FrozenError: NORMFORGE_FROZEN=1 forbids compiling" in other.stderr
    assert "weight_ptr=*fp32:16" in other.stderr


# By every name that it is called by.
NO_COMPILER = """
import triton
from triton.compiler import compiler
def refuse(*_, **__):
    raise AssertionError("Triton's compiler was called")
triton.compile = triton.compiler.compile = compiler.compile = refuse
"""


# Calls of every family, trained and not, and of groups in both layouts: held by a program or in parts, few and many.
# Beside them queries and keys of a packed tensor, latents of MLA, and gradients quantised both ways.
FAMILY_CALLS = """
bf16 = {"dtype": torch.bfloat16, "vectors": torch.bfloat16}
def run_families():
    chosen = cases(vary=("norm",), **bf16) + cases("channels", vary=("norm", "layout"), activation="silu", **bf16)
    for shape in ((2, 64, 5, 7), (300, 64, 5, 7), (2, 64, 96, 96)):
        for layout in ("contiguous", "channels last"):
            chosen += cases("group", vary=(), shape=shape, layout=layout, num_groups=32, activation="silu", **bf16)
    for case in chosen:
        given = operands(case, "cuda")
        check(case, given)
        with torch.no_grad():
            case.run(given)
def run_heads():
    q, k = torch.randn(3, 6, 64, device="cuda", dtype=torch.bfloat16).split((4, 2), 1)
    weight = torch.randn(64, device="cuda", requires_grad=True)
    for run in (torch.no_grad, torch.enable_grad):
        with run():
            results = normforge.qk_norm_rope(q, k, weight, weight, *torch.randn(2, 3, 32, device="cuda"))
    sum(each.float().sum() for each in results).backward()
    latents = torch.randn(3, 2112, device="cuda", dtype=torch.bfloat16)
    groups = {"group_size": 128, "out_dtype": torch.float8_e4m3fn}
    normforge.rms_norms([(latents[:, :1536], None, groups), (latents[:, 1536:2048], None, groups)])
    rows = torch.randn(105, 64, device="cuda", dtype=torch.bfloat16)
    mean, rstd = normforge.layer_statistics(rows)
    weight = weight.detach()
    normforge.quantised_layernorm2d_bwd(rows, rows, weight, mean=mean, rstd=rstd, wants=("dweight", "dbias"))
    normforge.quantised_rmsnorm2d_bwd(rows, rows, rstd=normforge.rms_statistics(rows), group_size=32)
    torch.cuda.synchronize()
"""


def test_what_was_recorded_runs_without_the_compiler(tmp_path: Path) -> None:
    """The kernels that ran while it was recorded, and no others, whatever the types and classes of rows are."""
    recording, out = str(tmp_path / "needed.yaml"), str(tmp_path / "kernels")
    program = f"{CALLS}{FAMILY_CALLS}run(dtype=torch.float32)\nrun_families()\nrun_heads()\n"
    listed = """
from normforge.kernels.obtain import obtained
print(*sorted({key.portable for key, _ in obtained()}), sep="\\n")
"""
    launched = printed(program + listed, NORMFORGE_RECORD=recording, TRITON_CACHE_DIR=str(tmp_path / "first"))
    here = torch.cuda.get_device_properties(0).multi_processor_count
    argv = ("aot", "--arch", target_of(torch.device("cuda", 0)).arch, "--multiprocessors", str(here), "--out", out)
    said = printed(
        command(*argv, "--recorded", recording), CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(tmp_path / "triton")
    )
    assert said.startswith(f"{len(launched.splitlines())} kernels for ")
    environment = {"NORMFORGE_AOT": out, "NORMFORGE_FROZEN": "1", "TRITON_CACHE_DIR": str(tmp_path / "other")}
    assert printed(program.replace("import torch", f"{NO_COMPILER}import torch", 1) + listed, **environment) == launched


@pytest.mark.usefixtures("nothing_compiled")
def test_the_public_launch_compiles_nothing_when_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launcher, "bind", lambda *_: None)
    x, weight = torch.randn(8, 1904, device="cuda"), torch.ones(1904, device="cuda")
    normforge.warmup([1904], ["ln_fwd_fp32"], bias_dtypes=[None], progress=False)
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    agree(normforge.layernorm2d_fwd(x, weight), ORACLE["layer"](x, weight))
