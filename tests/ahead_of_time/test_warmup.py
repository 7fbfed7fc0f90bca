"""Warm-up compiles all that is listed, for the GPU that is there, and says what it cannot."""

from __future__ import annotations

import pytest
import torch

import normforge
from normforge.ahead_of_time import compile_keys as keys
from normforge.ahead_of_time import warmup
from normforge.ahead_of_time.compile_keys import CompileKey, compile_keys
from normforge.errors import CompileError, ConflictError, DeviceError
from normforge.kernels.gpu import KernelKey, Target, named_target
from normforge.tools import cli
from normforge.upstream import triton_launcher


def test_without_a_gpu_warmup_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"no GPU was found .* normforge aot --arch sm_90"):
        normforge.warmup([64], ["ln_fwd_bf16"])
    with pytest.raises(ConflictError, match="arch was passed, and warmup compiles for a GPU that is here"):
        normforge.warmup([64], ["ln_fwd_bf16"], arch="sm_90")


def test_a_gpu_is_what_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    targets = {0: named_target("sm_90"), 1: named_target("sm_100")}
    monkeypatch.setattr(keys, "target_of", lambda device: targets[device.index])
    found = [keys.gpu(device) for device in (None, "cuda", 0, "cuda:0", torch.device("cuda", 1))]
    assert [device.index for device in found] == [1, 1, 0, 0, 1]
    assert keys.find_target(None, None, 0) == targets[0]
    with pytest.raises(DeviceError, match="device is 'cpu', and kernels are compiled for GPUs"):
        compile_keys([64], ["ln_fwd_bf16"], device="cpu")
    targets[1] = Target("sm_90", 32, 132, compiles=False)
    with pytest.raises(DeviceError, match="TRITON_INTERPRET=1 has kernels interpreted"):
        normforge.warmup([64], ["ln_fwd_bf16"])


@pytest.fixture
def obtained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[KernelKey, int]]:
    """What is compiled or loaded on a GPU that is not here."""
    taken: list[tuple[KernelKey, int]] = []
    monkeypatch.setattr(warmup, "gpu", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(warmup, "target_of", lambda device: named_target("sm_90"))
    monkeypatch.setattr(keys, "find_target", lambda *_: named_target("sm_90"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(warmup, "obtain", lambda key, function, target, device: taken.append((key, device)))
    return taken


@pytest.mark.parametrize("jobs", [None, 1, 3])
def test_warmup_obtains_every_key_once(
    jobs: int | None, obtained: list[tuple[KernelKey, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = normforge.warmup([64, 4096], ["ln_?wd_bf16"], jobs=jobs, weight_dtypes=["same", torch.float32])
    expected = compile_keys([64, 4096], ["ln_?wd_bf16"], arch="sm_90", weight_dtypes=["same", torch.float32])
    assert found == expected
    assert len(obtained) == len(found)
    assert set(obtained) == {(key.key, 0) for key in expected}
    assert f"{len(found)}/{len(found)}" in capsys.readouterr().err


@pytest.mark.usefixtures("obtained")
def test_warmup_builds_what_is_in_c_though_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(triton_launcher, "library", lambda *, build: asked.append(build))
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    normforge.warmup([64], ["ln_fwd_bf16"], progress=False)
    assert asked == [True]


@pytest.mark.usefixtures("obtained")
def test_jobs_are_at_least_one() -> None:
    with pytest.raises(ConflictError, match="jobs=0 will not do"):
        normforge.warmup([64], ["ln_fwd_bf16"], jobs=0, progress=False)


def test_a_kernel_that_is_refused_is_named_and_the_rest_left() -> None:
    found = compile_keys([64, 128, 256, 512], ["ln_fwd_bf16"], arch="sm_90")
    begun: list[CompileKey] = []

    def work(key: CompileKey) -> None:
        begun.append(key)
        raise RuntimeError("out of resource: shared memory\nand more")

    with pytest.raises(CompileError) as raised:
        warmup.for_each(found, work, named_target("gfx942"), doing="compile", jobs=1, progress=False)
    assert f"Triton refuses {begun[0]}: RuntimeError: out of resource: shared memory; leave" in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert len(begun) < len(found)


def test_the_command_takes_strides_of_heads(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["warmup", "--list", "--arch", "sm_90", "--n", "128", "--rows", "many", "rms_fwd_bf16", "--row-stride"]
    assert cli.main([*argv, "6144x32x128,x=6144x32x128+out=6144x32x128,x=4096x2x128x16x256"]) == 0
    operands = [line.split("rms_fwd_bf16_rows  ")[-1].split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert operands[2:-2] == [
        "x bf16, weight bf16, y bf16",
        "x bf16 on 2 strides, weight bf16, y bf16",
        "x bf16 on 2 strides, weight bf16, y bf16 on 2 strides",
        "x bf16 on 3 strides, weight bf16, y bf16",
    ]
