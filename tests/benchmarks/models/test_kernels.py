"""Kernels of a model's step: what Nsight Compute prints is read, grouped by owner, and kept."""

from __future__ import annotations

import os
import stat
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.errors import UsageError
from benchmarks.models import kernels, profile
from benchmarks.models.kernels import BYTES, NANOSECONDS, Launch, group_of, launches_in, load, render, save, summed
from benchmarks.models.names import BF16, EAGER, TRAIN
from benchmarks.models.worker import Job, read_job
from normforge.tools.machine import Machine

from .toy import CPU, HEADER, TOY

# The raw page as Nsight Compute 2025 prints it: its own lines first, then names, units and a line a kernel.
PRINTED = f'''==PROF== Connected to process 7
==PROF== Profiling "ln_fwd_bf16_one_pass" - 0: 0%....50%....100% - 1 pass
"ID","Process ID","Kernel Name","Block Size","{BYTES}","{NANOSECONDS}"
"","","","","byte","nsecond"
"0","7","spin_kernel(long)","(1, 1, 1)","0","1000"
"0","7","ln_fwd_bf16_one_pass","(128, 1, 1)","1,000,000,000","250,000"
"1","7","nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT","(384, 1, 1)","2000000000","1500000.5"
"2","7","ln_fwd_bf16_one_pass","(128, 1, 1)","500000000","150000"
==PROF== Disconnected from process 7
'''
ABOUT = ("toy", BF16, TRAIN, EAGER, "patch")


@pytest.mark.parametrize(
    ("name", "owner", "what"),
    [
        ("rms_bwd_bf16_addst_cbw_one_pass", "normforge", "norms"),
        ("sum_partials", "normforge", "norms"),
        ("_rms_norm_backward_kernel", "Liger", "norms, rotary, SwiGLU, loss"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "Inductor", "norms with their neighbours"),
        ("triton_per_fused_native_layer_norm_backward_7", "Inductor", "norms with their neighbours"),
        ("triton_red_fused__log_softmax_nll_loss_forward_2", "Inductor", "the loss"),
        ("triton_poi_fused_mul_silu_0", "Inductor", "elementwise and sums"),
        ("pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "cuDNN, FlashAttention", "attention"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT", "cuBLAS", "matrix products"),
        ("vectorized_layer_norm_kernel", "torch", "norms"),
        ("cunn_SoftMaxForward", "torch", "the loss"),
        ("at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>", "torch", None),
        ("mine", "other", "other"),
    ],
)
def test_a_kernel_is_told_by_its_name(name: str, owner: str, what: str | None) -> None:
    assert group_of(name) == (owner, what or "elementwise and sums")


def test_what_is_printed_is_read_and_summed_by_group() -> None:
    (step,) = launches_in(PRINTED)
    assert step[0] == Launch("ln_fwd_bf16_one_pass", 250_000, 1e9)
    product, norms = summed(ABOUT, step)
    assert (product.owner, product.launches, product.ms, product.gb) == ("cuBLAS", 1, 1.5, 2.0)
    assert (norms.owner, norms.launches, norms.ms, norms.gb) == ("normforge", 2, 0.4, 1.5)
    assert norms.largest == "ln_fwd_bf16_one_pass"


def test_a_profiler_that_counted_nothing_is_an_error_that_quotes_it() -> None:
    with pytest.raises(UsageError, match=r"printed no Kernel Name .* ERR_NVGPUCTRPERM"):
        launches_in("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n")


def test_rows_are_kept_and_shown_with_their_totals(tmp_path: Path) -> None:
    rows = summed(ABOUT, launches_in(PRINTED)[0])
    save(tmp_path, HEADER, rows)
    assert load(tmp_path) == (HEADER, rows)
    shown = render(rows, ["toy"])
    assert "0.40 ms, 1.50 GB, 2" in shown
    assert "1.90 ms, 3.50 GB, 3" in shown


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profiler in PATH that prints what is above for the step that it is given, and keeps its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    printed = folder / "printed"
    printed.write_text(PRINTED)
    script = folder / "ncu"
    script.write_text(
        "#!/bin/sh\n"
        f'echo "$@" > {folder}/arguments\n'
        'while [ "$1" != --log-file ]; do shift; done\n'
        f'cp {printed} "$2"\n'
        'while [ "$1" != benchmarks.models.profile ]; do shift; done\n'
        f'echo "$2" > {folder}/job\n'
        'echo patch > "$3"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def given(out: Path) -> Namespace:
    return Namespace(
        models=["llama"],
        variants=["patch"],
        dtypes=[BF16],
        steps=[TRAIN],
        runs=[EAGER],
        quick=True,
        out=out,
        fresh=False,
        revision="none",
    )


def test_the_command_profiles_what_is_not_in_the_table(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "_require_gpu", lambda: Machine(CPU, "a test", False))
    assert profile.model_kernels(given(tmp_path / "out"), []) == 0
    found = load(tmp_path / "out")
    assert found is not None
    assert [row.model for row in found[1]] == ["llama", "llama"]
    job = read_job((stand_in / "job").read_text())
    assert (job.model, job.runs, job.variants, job.size) == ("llama", (EAGER,), ("patch",), "quick")
    (stand_in / "job").unlink()
    assert profile.model_kernels(given(tmp_path / "out"), []) == 0
    assert not (stand_in / "job").exists(), "it was there already"
    assert "matrix products" in capsys.readouterr().out


def test_a_step_that_fails_is_reported(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (stand_in / "ncu").write_text("#!/bin/sh\necho out of memory >&2\nexit 9\n")
    monkeypatch.setattr(profile, "_require_gpu", lambda: Machine(CPU, "a test", False))
    assert profile.model_kernels(given(tmp_path / "out"), []) == 1
    assert "llama, bf16, train, eager: ended with status 9: out of memory" in capsys.readouterr().err


def test_steps_that_the_profiler_missed_are_reported(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (stand_in / "printed").write_text(PRINTED.replace(kernels.MARK, "another"))
    monkeypatch.setattr(profile, "_require_gpu", lambda: Machine(CPU, "a test", False))
    assert profile.model_kernels(given(tmp_path / "out"), []) == 1
    assert "1 steps were run, and the profiler saw 0" in capsys.readouterr().err


def test_each_variant_is_run_once_behind_a_mark(toy: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for name in ("synchronize", "_sleep", "profiler.start", "profiler.stop"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, name=name: seen.append(name))
    variants = ("torch", "patch", "patch-passes", "liger")
    job = Job(TOY.name, BF16, (EAGER,), (TRAIN,), variants, "full", "cpu", str(tmp_path), HEADER)
    profile.show_steps(job, tmp_path / "order")
    assert [name for name in seen if name != "synchronize"] == ["profiler.start", "_sleep", "profiler.stop"] * 2
    assert (tmp_path / "order").read_text().splitlines() == ["torch", "patch"]


def test_groups_do_not_share_a_name() -> None:
    names = [(group.owner, group.what) for group in kernels.GROUPS]
    assert len(set(names)) == len(names)
