"""Kernels compiled ahead of time, loaded without a compiler and never the wrong ones; and warm-up, which compiles."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import normforge
from normforge.ahead_of_time import compile_keys as keys
from normforge.ahead_of_time import warmup
from normforge.ahead_of_time.compile_keys import CompileKey, compile_keys
from normforge.ahead_of_time.warmup import Built, build
from normforge.errors import AotError, CompileError, ConflictError, DeviceError, FrozenError
from normforge.kernels import binaries
from normforge.kernels import obtain as obtaining
from normforge.kernels.binaries import FORMAT, INDEX, Folder, read, source_digest, triton_version
from normforge.kernels.gpu import KernelKey, Target, named_target
from normforge.kernels.obtain import compile_for, obtain
from normforge.selection import dispatch
from normforge.tools import cli
from normforge.tools.arguments import check_folder
from normforge.upstream import triton_launcher
from proving.cases import cases

from ..calling import there
from ..folders import RMS, instance, write
from ..launching import launching_nothing
from ..stand_in_driver import Driver, driving
from ..thorough import first_of_each
from .calls import CALLS, train

pytestmark = pytest.mark.usefixtures("nothing_compiled")

TARGET = named_target("sm_90")
# A forward kernel, and the two of a backward pass.
MODES = ["rms_fwd_bf16", "rms_bwd_bf16"]


def wanted(n: int = 64, arch: str = "sm_90") -> list[CompileKey]:
    return compile_keys([n], MODES, arch=arch, rows=["few"])


def made(out: Path, keys: list[CompileKey], arch: str = "sm_90") -> Built:
    return build(keys, named_target(arch), out, jobs=1, progress=False)


@pytest.fixture(scope="session")
def compiled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of kernels, made once."""
    out = tmp_path_factory.mktemp("aot") / "sm_90"
    assert made(out, wanted()) == Built(compiled=3, kept=0, removed=0)
    return out


@pytest.fixture
def folder(compiled_folder: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return Path(shutil.copytree(compiled_folder, tmp_path / "kernels"))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's compiler out of order, wherever it is called by name."""
    import triton
    from triton.compiler import compiler

    for module in (triton, triton.compiler, compiler):
        monkeypatch.setattr(module, "compile", Mock(side_effect=AssertionError("Triton's compiler was called")))


def take(key: CompileKey) -> Driver:
    """Load a key's kernel as a call on a GPU would, and return what its driver saw."""
    with driving() as driver:
        obtain(key.key, key.function, TARGET, 0)
    return driver


def change(folder: Path, **entries: Any) -> None:
    """Write an index anew with other entries."""
    document = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(document | entries))


TRAINED = [
    *cases("l2", "channels", "statistics", vary=("norm",), dtype=torch.bfloat16),
    *cases("channels", vary=(), dtype=torch.bfloat16, layout="channels last", activation="silu"),
    *cases("added", "renormed", vary=("norm",), dtype=torch.bfloat16),
]
# A kind of calls, a name and a call.
WALKED = [(case.family, f"{case}-{case['norm']}", partial(train, case)) for case in TRAINED]
WALKED += [("both ways", name, row["call"]) for name, row in CALLS.items() if name.endswith("both ways")]


@pytest.mark.compile
@pytest.mark.parametrize("walked", first_of_each(WALKED, lambda row: row[0], lambda row: row[1]))
def test_a_frozen_process_takes_what_was_recorded(
    walked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """From a training step, by a recording and a folder, to kernels without the compiler."""
    path, out = tmp_path / "needed.yaml", tmp_path / "kernels"
    with launching_nothing(TARGET) as met, normforge.record(path):
        walked[2]()
    keys = normforge.recorded_keys(path, arch="sm_90")
    made(out, keys)
    assert set(read(out).rows) == {key.portable for key in met}
    request.getfixturevalue("no_compiler")
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    monkeypatch.setenv("NORMFORGE_AOT", str(out))
    assert all(take(key).loaded for key in keys)


@pytest.mark.compile
def test_a_folder_without_room_for_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "replace_file", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(AotError, match=r"out cannot be written \(No space left\); name another folder: --out DIR$"):
        made(tmp_path / "out", wanted())


@pytest.mark.compile
@pytest.mark.parametrize("n", [64, 16384])
def test_what_is_loaded_is_what_would_be_compiled(n: int, tmp_path: Path) -> None:
    """Shared memory, registers, cooperative launches and scratch memory come along in the metadata."""
    keys = compile_keys([n], ["ln_bwd_bf16"], arch="sm_90", rows=["many"])
    made(tmp_path / "kernels", keys)
    made_ahead = read(tmp_path / "kernels")
    for key in keys:
        kernel, expected = made_ahead.find(key.key, key.function, TARGET), compile_for(key.key, key.function, TARGET)
        assert kernel.asm["cubin"] == expected.asm["cubin"]
        assert kernel.metadata == expected.metadata
        assert kernel.packed_metadata == expected.packed_metadata
        assert (kernel.src.signature, kernel.src.constants) == (expected.src.signature, expected.src.constants)
        if key.key.symbol.endswith("_spread"):
            assert kernel.metadata.launch_cooperative_grid


@pytest.mark.compile
def test_what_the_folder_lacks_is_compiled_or_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    normforge.load_aot(folder)
    other = wanted(n=66)[0]
    assert take(other).loaded
    monkeypatch.setattr(obtaining, "_compiled", {})
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    # Triton's cache has it now.
    assert take(other).loaded
    third = wanted(n=67)[0]
    with pytest.raises(FrozenError, match=re.escape(f"cache does not hold it, and neither does {folder}; compile it")):
        take(third)


@pytest.mark.compile
def test_kernels_of_a_users_own_folder(fresh_table: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package has another name in each process, and after each load."""
    write(tmp_path / "mine", [instance(RMS, 64)])
    normforge.load_instances(tmp_path / "mine")
    before = compile_keys([64], [RMS], arch="sm_90", rows=["few"])
    made(tmp_path / "kernels", before)
    normforge.load_instances(tmp_path / "mine")
    (after,) = compile_keys([64], [RMS], arch="sm_90", rows=["few"])
    assert before[0].key.kernel != after.key.kernel
    normforge.load_aot(tmp_path / "kernels")
    monkeypatch.setattr(obtaining, "compile_for", lambda *_: pytest.fail("it was compiled again"))
    assert take(after).loaded


def damaged(folder: Path) -> str:
    path = next(folder.glob("rms_fwd*.cubin"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return f"{path} is damaged: it is not what index.json says; compile it again: normforge aot --arch sm_90 "


def metadata_changed(folder: Path) -> str:
    path = next(folder.glob("rms_fwd*.json"))
    path.write_text(path.read_text().replace('"num_warps": ', '"num_warps": 1'))
    return f"{path} is damaged"


def missing(folder: Path) -> str:
    path = next(folder.glob("rms_fwd*.cubin"))
    path.unlink()
    return f"{path} cannot be read (No such file or directory); compile it again"


def another_source(folder: Path) -> str:
    document = json.loads((folder / INDEX).read_text())
    change(folder, kernels=[row | {"source_sha256": "0" * 64} for row in document["kernels"]])
    return f"{folder} holds rms_fwd_bf16_"


def another_architecture(folder: Path) -> str:
    change(folder, arch="sm_80")
    return (
        f"{folder} holds kernels for sm_80, and this GPU is sm_90; compile for it, into another folder: normforge aot "
        "--arch sm_90"
    )


def no_folder(folder: Path) -> str:
    shutil.rmtree(folder)
    return f"{folder} holds no compiled kernels: no index.json (No such file or directory); make one: normforge aot"


def another_format(folder: Path) -> str:
    change(folder, format=FORMAT + 1)
    return f"{folder} has format {FORMAT + 1} and this normforge reads {FORMAT}; remove it and make one: normforge aot"


def another_triton(folder: Path) -> str:
    change(folder, triton="3.5.0")
    return (
        f"{folder} was compiled by Triton 3.5.0 and this process has {triton_version()}, which may launch kernels "
        f"otherwise; compile it again: normforge aot --arch sm_90 ... --out {folder}, or install triton==3.5.0"
    )


OF_KERNELS = [damaged, metadata_changed, missing, another_source, another_architecture]


@pytest.mark.compile
@pytest.mark.parametrize("spoil", [*OF_KERNELS, no_folder, another_format, another_triton])
@pytest.mark.parametrize("by", ["function", "environment"])
def test_what_does_not_fit_is_refused(
    spoil: Callable[[Path], str], by: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder as it is read, and a kernel as it is loaded."""
    message = spoil(folder)
    monkeypatch.setenv("NORMFORGE_AOT", str(folder) if by == "environment" else "")
    key = wanted()[0]

    def run() -> None:
        if by == "function":
            normforge.load_aot(folder)
        obtain(key.key, key.function, TARGET, 0)

    for _ in range(2):
        with driving() as driver, pytest.raises(AotError) as raised:
            run()
        assert str(raised.value).startswith(message)
        assert not driver.loaded
        assert not obtaining.obtained()


def test_an_index_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX)
    with pytest.raises(AotError, match="it is no regular file"):
        normforge.load_aot(tmp_path)
    with pytest.raises(AotError, match="is no path"):
        normforge.load_aot(3)  # type: ignore[arg-type]  # what the test is about


@pytest.mark.compile
def test_a_folder_that_is_refused_leaves_the_one_before(folder: Path, tmp_path: Path) -> None:
    normforge.load_aot(folder)
    with pytest.raises(AotError):
        normforge.load_aot(tmp_path / "none")
    assert there(binaries.loaded()).path == folder


def test_the_source_is_that_of_the_kernel_and_of_what_it_calls(fresh_table: None, tmp_path: Path) -> None:
    digests = []
    for name, changed in (("mine", ""), ("again", ""), ("other", "rms_fwd_fp32.py"), ("shared", "primitives.py")):
        folder = write(tmp_path / name, [instance(RMS, 64)])
        if changed:
            (folder / changed).write_text((folder / changed).read_text() + "# Another line.\n")
        normforge.load_instances(folder)
        digests.append(source_digest(dispatch.find(RMS, 64).load(dispatch.find(RMS, 64).tile(1, 64, "sm_90").pipeline)))
    first, again, other, shared = digests
    assert first == again
    assert len({first, other, shared}) == 3


@pytest.mark.compile
def test_a_second_build_compiles_nothing_and_leaves_nothing_over(folder: Path, no_compiler: None) -> None:
    files = {path.name for path in folder.iterdir()}
    assert made(folder, wanted()) == Built(compiled=0, kept=3, removed=0)
    assert {path.name for path in folder.iterdir()} == files
    first, *others = wanted()
    # What a killed process may leave, and what a user put there.
    (folder / f".a-{'0' * 16}.cubin.{'1' * 16}").write_text("half")
    (folder / "notes.txt").write_text("mine")
    assert made(folder, [first]) == Built(compiled=0, kept=1, removed=len(others))
    row = read(folder).rows[first.key.portable]
    assert {path.name for path in folder.iterdir()} == {INDEX, "notes.txt", *row.files}


@pytest.mark.compile
@pytest.mark.parametrize("spoil", [damaged, missing, another_source, another_triton])
def test_a_build_mends_what_does_not_fit(spoil: Callable[[Path], str], folder: Path) -> None:
    spoil(folder)
    assert made(folder, wanted()).compiled >= 1
    normforge.load_aot(folder)
    for key in wanted():
        assert take(key).loaded


@pytest.mark.compile
def test_a_build_that_fails_leaves_the_folder_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    with pytest.raises(FrozenError):
        made(folder, [*wanted(), *wanted(n=68)])
    assert set(read(folder).rows) == {key.key.portable for key in wanted()}
    with pytest.raises(FrozenError):
        made(folder.with_name("fresh"), wanted(n=68))
    monkeypatch.delenv("NORMFORGE_FROZEN")
    assert made(folder.with_name("fresh"), wanted(n=68)[:1]) == Built(compiled=1, kept=0, removed=0)


def test_a_build_spares_what_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(AotError, match=r"is there already and is no folder of compiled kernels .* name another"):
        check_folder(tmp_path, TARGET)
    with pytest.raises(AotError, match="is there already"):
        check_folder(tmp_path / "mine.txt", TARGET)
    foreign = Folder(tmp_path / "foreign", "0", triton_version(), "gfx942", {})
    foreign.path.mkdir()
    foreign.save()
    with pytest.raises(AotError, match=r"holds kernels for gfx942 and these are for sm_90; name another folder"):
        check_folder(foreign.path, TARGET)
    with pytest.raises(AotError, match=r"folder cannot be written \(Not a directory\); name another folder: --out DIR"):
        check_folder(tmp_path / "mine.txt" / "folder", TARGET)
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.compile
@pytest.mark.parametrize(
    ("arch", "binary"), [("sm_80", "cubin"), ("sm_90", "cubin"), ("sm_100", "cubin"), ("gfx942", "hsaco")]
)
def test_the_command_compiles_for_every_architecture(
    arch: str, binary: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / arch
    command = ["aot", "--arch", arch, "--n", "64", "--rows", "few", "--out", str(out), "rms_fwd_bf16_fp8_e4m3fn_dq"]
    assert cli.main(command) == 0
    assert f"1 kernels for {arch} in {out}: 1 compiled, 0 unchanged, 0 removed" in capsys.readouterr().out
    index = json.loads((out / INDEX).read_text())
    assert (index["arch"], index["triton"], index["normforge"]) == (arch, triton_version(), normforge.__version__)
    (row,) = index["kernels"]
    metadata = json.loads((out / f"{row['file']}.json").read_text())
    assert str(metadata["target"]["arch"]) == arch.removeprefix("sm_")
    assert (out / f"{row['file']}.{binary}").read_bytes().startswith(b"\x7fELF")


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
def test_warmup_builds_what_is_in_c_though_frozen_by_one_job_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(triton_launcher, "library", lambda *, build: asked.append(build))
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    normforge.warmup([64], ["ln_fwd_bf16"], progress=False)
    assert asked == [True]
    with pytest.raises(ConflictError, match="jobs=0 will not do"):
        normforge.warmup([64], ["ln_fwd_bf16"], jobs=0, progress=False)


def test_a_kernel_that_is_refused_is_named_and_the_rest_left() -> None:
    found = compile_keys([64, 128, 256, 512], ["ln_fwd_bf16"], arch="sm_90")
    work = Mock(side_effect=RuntimeError("out of resource: shared memory\nand more"))
    with pytest.raises(CompileError) as raised:
        warmup.for_each(found, work, named_target("gfx942"), doing="compile", jobs=1, progress=False)
    begun = [call.args[0] for call in work.call_args_list]
    told = [f"Triton refuses {key}: RuntimeError: out of resource: shared memory; leave" for key in begun]
    assert any(each in str(raised.value) for each in told)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert len(begun) < len(found)


def test_a_parser_that_another_thread_confused_is_asked_again() -> None:
    found = compile_keys([64], ["ln_fwd_bf16"], arch="sm_90")
    work = Mock(side_effect=[SystemError("AST constructor recursion depth mismatch"), *found])
    made = warmup.for_each(found, work, named_target("gfx942"), doing="compile", jobs=1, progress=False)
    assert made == found


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
