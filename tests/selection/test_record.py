"""What the loaded table lacks: recorded as a manifest, and generated into the user's cache, once and safely."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import py_compile
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import normforge
from normforge import errors, settings
from normforge.call_kinds import CallKind
from normforge.codegen import cli, emit, manifest
from normforge.codegen.instance import Bucket
from normforge.codegen.model import Mode
from normforge.codegen.tiling import ladder_of
from normforge.errors import CacheError, MissingInstanceError, RecordError, SettingError
from normforge.selection import dispatch, on_demand, recording
from normforge.tools.cli import main

from ..calling import check, each_norm, each_pipeline, in_threads, printed, printed_at_once, python
from ..covering import every_mode
from ..folders import PLAIN, RMS, instance, write
from ..thorough import THOROUGH

pytestmark = pytest.mark.usefixtures("fresh_table")

BF16 = torch.bfloat16
# What the committed table does not hold.
ASK: dict[str, Any] = {"fquant": "dynamic", "rounding": "truncate"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a recording goes, of which nothing is there yet."""
    return tmp_path / "needed.yaml"


def names(path: Path) -> list[str]:
    """The instances that a manifest makes."""
    return [instance.name for instance in manifest.load(path).instances]


def calls(path: Path) -> frozenset[CallKind]:
    """The kinds of call that a recording keeps."""
    return recording.read(path, path.read_bytes()).calls


def forward() -> None:
    check("layer", torch.randn(3, 64), torch.randn(64), torch.randn(64))


def fused() -> None:
    x, residual, smooth = torch.randn(2, 1500, dtype=BF16), torch.randn(2, 1500, dtype=BF16), torch.rand(1500) + 0.5
    check("rms", x, residual=residual, fadd="pre_add_store", smooth_scale=smooth, fquant="smooth_dynamic")


def trained() -> None:
    x = torch.randn(4, 200, requires_grad=True)
    weight = torch.randn(200, requires_grad=True)
    torch.autograd.grad(normforge.layer_norm(x, (200,), weight).sum(), (x, weight))


def missing() -> None:
    check("layer", torch.randn(2, 64), **ASK)


def grouped() -> None:
    normforge.group_norm(torch.randn(1, 4, 9), 2, activation="silu")


CALLS = (forward, fused, trained, missing, grouped)
ALL = [
    *("gn_fwd_fp32_silu_n128", "ln_bwd_fp32_n256", "ln_fwd_fp32_int8_dq_trunc_n128", "ln_fwd_fp32_mv_n256"),
    *("ln_fwd_fp32_n128", "rms_fwd_bf16_int8_addst_sdq_n1536"),
]
LENGTHS = (64, 200, 300, 600, 1500, 2500, 3500, 5000)


def test_what_was_recorded_is_all_that_the_same_calls_need(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NORMFORGE_ON_MISS", "error")
    folder = tmp_path / "mine"
    with normforge.record(path):
        for call in CALLS:
            if call in (missing, grouped):
                with pytest.raises(MissingInstanceError):
                    call()
            else:
                call()
    assert sorted(names(path)) == ALL
    assert cli.main(["--manifest", str(path), "--out", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("6 instances in 6 modules")
    normforge.load_instances(folder)
    assert sorted(entry.name for entry in normforge.instances()) == ALL
    for call in CALLS:
        call()
    with pytest.raises(MissingInstanceError):
        check("rms", torch.randn(2, 64))


def test_the_file_reads_as_one_that_people_write(path: Path) -> None:
    with normforge.record(path):
        fused()
        forward()
        check("layer", torch.randn(3, 200))
    assert path.read_text() == Path(__file__).with_name("recorded.yaml").read_text()


def test_nested_recordings_each_hold_what_was_asked_within(tmp_path: Path) -> None:
    """Of calls that were known before too, in a file that is there before the recording ends, however it ends."""
    outer, inner = tmp_path / "outer.yaml", tmp_path / "inner.yaml"
    known = ["ln_bwd_fp32_n256", "ln_fwd_fp32_n128", "ln_fwd_fp32_mv_n256"]
    with normforge.record(outer):
        forward()
        trained()
        with contextlib.suppress(ZeroDivisionError), normforge.record(inner):
            forward()
            trained()
            assert names(inner) == known
            check("rms", torch.randn(2, 64))
            assert sorted(tmp_path.iterdir()) == [inner, outer]
            raise ZeroDivisionError
        check("rms", torch.randn(2, 200))
    check("rms", torch.randn(2, 300))
    assert names(inner) == [*known, "rms_fwd_fp32_n128"]
    assert names(outer) == [*known, "rms_fwd_fp32_n128", "rms_fwd_fp32_n256"]
    assert not dispatch._observers


def test_the_buckets_of_the_loaded_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_ON_MISS", "error")
    mine, path = tmp_path / "mine.yaml", tmp_path / "needed.yaml"
    mine.write_text(
        "buckets: {n100: 1..100, n300: 101..300, nbig: 301..}\ngroups: {a: {norm: layer, dtype_in: fp32}}\n"
    )
    normforge.load_instances(write(tmp_path / "mine", manifest.load(mine).instances))
    with normforge.record(path):
        check("layer", torch.randn(2, 200))
        with pytest.raises(MissingInstanceError):
            check("rms", torch.randn(2, 64))
    assert names(path) == ["ln_fwd_fp32_n300", "rms_fwd_fp32_n100"]
    assert [str(bucket) for bucket in manifest.load(path).buckets] == ["1..100", "101..300", "301.."]


def test_buckets_of_several_ladders_are_made_in_parts(path: Path) -> None:
    wide, narrow, long = (Bucket("n4096", 1, 4096), Bucket("n256", 129, 256), Bucket("nbig", 5121, None))
    path.write_text(recording.manifest_of([(PLAIN, wide), (RMS, narrow), (RMS, long)]))
    assert manifest.load(path).buckets == ladder_of((128, 256, 4096, 5120, None))
    assert names(path) == [
        *("ln_fwd_fp32_n128", "ln_fwd_fp32_n256", "ln_fwd_fp32_n4096"),
        *("rms_fwd_fp32_n256", "rms_fwd_fp32_nbig"),
    ]


@THOROUGH
def test_any_legal_mode_can_be_written(tmp_path: Path) -> None:
    """One in five of them: a manifest of all takes 26 s."""
    path, modes = tmp_path / "needed.yaml", every_mode()[::5]
    path.write_text(recording.manifest_of((mode, instance(mode, 64).bucket) for mode in modes))
    assert sorted(names(path)) == sorted(f"{mode.name}_n128" for mode in modes)


def test_an_empty_recording_writes_nothing_and_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="normforge"), normforge.record(path):
        normforge.which(torch.empty(2, 64))
    assert not path.exists()
    assert [said.getMessage() for said in caplog.records] == [
        f"no instance was asked for, so {path} was not written: a manifest needs one"
    ]


def test_an_earlier_recording_is_added_to(path: Path) -> None:
    for n, made in ((64, ["rms_fwd_fp32_n128"]), (200, ["rms_fwd_fp32_n128", "rms_fwd_fp32_n256"])):
        with normforge.record(path):
            check("rms", torch.randn(2, n))
        assert names(path) == made


@pytest.mark.parametrize(
    ("below", "text", "said"),
    [
        ("a", "# Recorded by normforge\ngroups: [", r"cannot be added to: .*/a:2: this is not valid YAML"),
        ("a", "# Recorded by normforge\n\udcff", r"cannot be added to: it is not UTF-8 text"),
        ("a", "# Recorded by normforge\ngroups: {}\ncalls: 1\n", r"line 3 has more than calls:"),
        ("a", "groups: {}\n", r"was not written by a recording .*; move it elsewhere, or name another file"),
        # It would look like a recording that holds the calls of all its instances.
        (
            "a",
            "# Recorded by normforge\ngroups: {a: {norm: rms, dtype_in: fp32, n: 64}}\n",
            "kept instances and no calls; remove it, or name another file",
        ),
        ("none/a", "", "make its folder"),
        ("", "", "name another file"),
    ],
    ids=["no manifest any more", "no text", "calls in one line", "a manifest", "an old one", "no folder", "a folder"],
)
def test_a_file_that_cannot_be_added_to_is_kept(below: str, text: str, said: str, tmp_path: Path) -> None:
    if text:
        (tmp_path / below).write_text(text, errors="surrogateescape")
    with pytest.raises(RecordError, match=said), normforge.record(tmp_path / below):
        raise AssertionError("entered")
    kept = [path.read_text(errors="surrogateescape") for path in tmp_path.iterdir()]
    assert kept == ([text] if text else [])
    assert not dispatch._observers


def test_a_path_that_cannot_be_written_any_more(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with normforge.record(folder / "needed.yaml"):
        folder.rmdir()
        for _ in range(2):
            with pytest.raises(RecordError, match="No such file or directory"):
                forward()
        folder.mkdir()
        forward()
    assert names(folder / "needed.yaml") == ["ln_fwd_fp32_n128"]


PROGRAM = """
import os, torch, normforge
os.chdir("/")
normforge.layernorm2d_fwd(torch.randn(2, 64))
"""


def test_a_whole_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is where it was named from, wherever the program goes."""
    monkeypatch.chdir(tmp_path)
    assert printed(PROGRAM, NORMFORGE_RECORD="needed.yaml") == ""
    assert names(tmp_path / "needed.yaml") == ["ln_fwd_fp32_n128"]


@THOROUGH
def test_processes_that_record_at_once_lose_nothing(path: Path, tmp_path: Path) -> None:
    modes = ("ln_fwd_bf16", "ln_fwd_fp16", "rms_fwd_bf16", "rms_fwd_fp16")
    code = """
from normforge.call_kinds import CallKind
from normforge.codegen.model import Mode
for n in (64, 200, 300, 600, 1500, 2500, 3500, 5000):
    normforge.selection.dispatch.find(Mode.from_name(MODE), n)
    normforge.selection.dispatch.tell(lambda: CallKind(MODE, (("n", n),), rows="few"))
"""
    codes = [code.replace("MODE", repr(mode)) for mode in modes]
    printed_at_once("import normforge", codes, tmp_path, NORMFORGE_RECORD=str(path))
    buckets = (128, 256, 512, 768, 1536, 3072, 4096, 5120)
    assert names(path) == [f"{mode}_n{last}" for mode in modes for last in buckets]
    assert {(kind.mode, kind.n) for kind in calls(path)} == {(mode, n) for mode in modes for n in LENGTHS}
    assert {left.name for left in tmp_path.iterdir() if not left.name.startswith("ready")} == {"needed.yaml"}


@THOROUGH
def test_a_process_whose_recording_cannot_be_written_says_so_in_its_status(tmp_path: Path) -> None:
    """Also when the program has swallowed the error of the call."""
    folder = tmp_path / "folder"
    folder.mkdir()
    code = f"""
import os, torch, normforge
os.rmdir({str(folder)!r})
try:
    normforge.layernorm2d_fwd(torch.randn(2, 64))
except normforge.errors.RecordError:
    print("swallowed")
"""
    process = python(code, NORMFORGE_RECORD=str(folder / "needed.yaml"))
    assert (process.returncode, process.stdout) == (1, "swallowed\n")
    assert process.stderr.splitlines()[-1].startswith(
        "normforge: error: the instances that are asked for cannot be recorded to"
    )


@THOROUGH
def test_a_process_of_several_names_its_own_file(tmp_path: Path) -> None:
    """The id is that of the process which imported normforge; children of it that were forked add to its file."""
    code = f"import os\n{PROGRAM}\nprint(os.getpid())"
    pid = printed(code, NORMFORGE_RECORD=str(tmp_path / "needed.%r.%p.100%%.yaml"), RANK="3")
    assert [path.name for path in tmp_path.iterdir()] == [f"needed.3.{pid}.100%.yaml"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("needed.%d.yaml", "has '%d'; it takes %p (the process's id), %r (its RANK) and %%"),
        ("needed%", "has '%'; it takes %p"),
        ("needed.%r.yaml", "has '%r', and RANK, which torchrun sets, is not set; write %p, the process's id"),
    ],
)
def test_names_that_no_process_has(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_RECORD", name)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RecordError, match=re.escape(f"NORMFORGE_RECORD={name!r} {said}")):
        settings.recording()


@pytest.fixture
def of_two(tmp_path: Path) -> list[Path]:
    """Recordings of two processes, which share one call of two each."""
    paths = [tmp_path / "needed.1.yaml", tmp_path / "needed.2.yaml"]
    for path, n in zip(paths, (64, 200), strict=True):
        with normforge.record(path):
            forward()
            check("rms", torch.randn(2, n))
    return paths


def merged(out: Path, *paths: Path) -> int:
    return main(["merge", "--out", str(out), *map(str, paths)])


def test_recordings_are_merged(of_two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "needed.yaml"
    for _ in range(2):
        assert merged(out, *of_two) == 0
        assert capsys.readouterr().out == f"3 instances and 3 kinds of call in {out}\n"
    assert names(out) == ["ln_fwd_fp32_n128", "rms_fwd_fp32_n128", "rms_fwd_fp32_n256"]
    assert calls(out) == calls(of_two[0]) | calls(of_two[1])
    # Whichever comes first, and into one of them too.
    assert merged(tmp_path / "other.yaml", *reversed(of_two)) == 0
    assert merged(of_two[0], of_two[1], of_two[0]) == 0
    assert (tmp_path / "other.yaml").read_text() == out.read_text() == of_two[0].read_text()


def test_a_merge_that_fails_leaves_the_output(
    of_two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = of_two[0].read_text()
    of_two[1].write_text(of_two[1].read_text()[:-20])
    assert merged(of_two[0], of_two[1]) == 2
    assert f"{of_two[1]} cannot be read: line " in capsys.readouterr().err
    assert of_two[0].read_text() == before
    (tmp_path / "mine.yaml").write_text("groups: {}\n")
    assert merged(tmp_path / "mine.yaml", of_two[0]) == 2
    assert "was not written by a recording" in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_text() == "groups: {}\n"
    assert merged(tmp_path / "out.yaml", tmp_path / "none.yaml") == 2
    assert "none.yaml cannot be read (No such file or directory)" in capsys.readouterr().err


MANIFEST = """
buckets: {n64: 1..64, nbig: 65..}
groups:
  unet: {norm: group, direction: [fwd, bwd], dtype_in: fp32, activation: [none, silu], n: all}
  rows: {norm: layer, dtype_in: fp32, n: n64}
"""


def test_a_manifests_kernels_serve_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tmp_path / "mine.yaml", tmp_path / "kernels"
    path.write_text(MANIFEST)
    assert main(["generate", "--manifest", str(path), "--out", str(folder)]) == 0
    monkeypatch.setenv("NORMFORGE_ON_MISS", "error")
    normforge.load_instances(folder)
    assert {"gn_fwd_fp32_n64", "gn_bwd_fp32_silu_nbig"} <= {entry.name for entry in normforge.instances()}
    for positions in (5, 60):
        x = torch.randn(2, 8, positions, requires_grad=True)
        y = normforge.group_norm(x, 2, activation="silu")
        want = functional.silu(functional.group_norm(x, 2))
        torch.testing.assert_close(y, want)
        found, wanted = (torch.autograd.grad(each.square().sum(), x)[0] for each in (y, want))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(errors.MissingInstanceError) as missed:
        normforge.group_norm(x.detach().bfloat16(), 2)
    said = str(missed.value)
    assert "serves gn_fwd_bf16 with N = 240" in said
    assert "    norm: group\n    dtype_in: bf16\n    n: nbig\n" in said
    with pytest.raises(errors.MissingInstanceError, match="gn_fwd_fp32_cl with N = 240"):
        normforge.group_norm(x.detach().movedim(1, 2).contiguous().movedim(2, 1), 2)


# A legal mode that the committed table does not hold, and the call that asks for it.
MODE = "ln_fwd_fp32_int8_dq_trunc"

# What every folder of kernels holds beside its modes and its table.
SHARED = set(emit.shared_files(backward=True, groups=True, peers=True))

# The same in a process of its own; it prints where the kernel came from, and the q of a row.
CALL = """
import logging, sys, torch, normforge
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
x = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
print(normforge.layernorm2d_fwd(x, fquant="dynamic", rounding="truncate").y.tolist())
"""
# (1, 2, 3, 6) - 3 over its largest, 3: truncated 127 * (-2/3, -1/3, 0, 1).
Q = "[[-84, -42, 0, 127]]"


def folder_of(cache: Path) -> Path:
    """The one folder inside a cache."""
    (folder,) = cache.iterdir()
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """Every generated file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def miss() -> None:
    """Call for what the table lacks, without rows, so that nothing is launched."""
    normforge.layernorm2d_fwd(torch.empty(0, 64), **ASK)


def not_served(error: type[errors.NormforgeError], said: str | None = None) -> None:
    """Neither a call of what the table lacks, nor `which`."""
    for function in (normforge.layernorm2d_fwd, normforge.which):
        with pytest.raises(error, match=said):
            function(torch.empty(0, 64), **ASK)


@pytest.fixture
def filled(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache that an earlier process filled: this one has imported nothing from there."""
    miss()
    monkeypatch.setattr(dispatch, "_generated", dispatch._NOTHING)
    dispatch.forget()
    on_demand._package.cache_clear()
    return folder_of(empty_cache)


@each_pipeline
@each_norm
def test_a_miss_is_generated_and_right(norm: str, n: int, empty_cache: Path) -> None:
    x = torch.randn(3, n)
    name = normforge.which(x, **ASK, norm=norm)
    before = [entry.name for entry in normforge.instances()]
    assert name not in before
    assert not empty_cache.exists(), "naming an instance generates nothing"
    check(norm, x, torch.randn(n), **ASK)
    assert [entry.name for entry in normforge.instances()] == [*before, name]
    mode, made = Mode.from_name(name.rsplit("_", 1)[0]), files(folder_of(empty_cache))
    assert set(made) == {*SHARED, f"{mode.name}.py"}
    # Whichever row length comes first.
    assert made[f"{mode.name}.py"] == emit.render_module(mode, mode.pipelines).encode()
    assert normforge.which(x, **ASK, norm=norm) == name


def test_modules_share_a_folder_within_a_tick_of_the_clock(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes a folder whose time has not changed for one that holds nothing new."""
    replace = on_demand._replace

    def replace_within_the_tick(path: Path, text: str) -> None:
        replace(path, text)
        os.utime(path.parent, (1e9, 1e9))

    monkeypatch.setattr(on_demand, "_replace", replace_within_the_tick)
    check("layer", torch.randn(2, 64), **ASK)
    check("rms", torch.randn(2, 64), **ASK)


@pytest.mark.parametrize("name", [f"{MODE}.py", "primitives.py", "__init__.py"])
@pytest.mark.parametrize("spoil", [lambda text: text[: len(text) // 2], lambda text: "raise SystemExit\n" + text])
def test_a_file_that_is_not_the_generators_is_replaced(name: str, spoil: Callable[[str], str], filled: Path) -> None:
    right = files(filled)
    (filled / name).write_text(spoil((filled / name).read_text()))
    check("layer", torch.randn(2, 64), **ASK)
    assert files(filled) == right


def test_the_digest_is_of_the_templates(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(on_demand._generator_digest.cache_clear)
    own = on_demand.cache_folder()
    templates = tmp_path / "templates"
    templates.mkdir()
    for path in emit.TEMPLATES.glob("*.j2"):
        (templates / path.name).write_bytes(path.read_bytes())

    def folder() -> Path:
        on_demand._generator_digest.cache_clear()
        return on_demand.cache_folder()

    monkeypatch.setattr(emit, "TEMPLATES", templates)
    assert folder() == own
    with (templates / "primitives.py.j2").open("a") as file:
        file.write("\n")
    assert folder() != own


def test_the_cache_is_the_users_unless_the_variable_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NORMFORGE_CACHE", raising=False)
    assert on_demand.cache_folder().parent == tmp_path / "xdg" / "normforge"
    for said, folder in ((str(tmp_path / "mine"), "mine"), ("", "xdg/normforge"), ("~/mine", "mine")):
        monkeypatch.setenv("NORMFORGE_CACHE", said)
        assert on_demand.cache_folder().parent == tmp_path / folder


@pytest.mark.parametrize("blocked", ["root", "folder", "file"])
def test_a_cache_that_cannot_be_written(blocked: str, empty_cache: Path) -> None:
    """A file where a folder should be, or the reverse: also the superuser, whom no mode bits stop, stumbles there."""
    folder = on_demand.cache_folder()
    if blocked == "root":
        empty_cache.write_text("no folder")
    elif blocked == "folder":
        empty_cache.mkdir()
        folder.write_text("no folder")
    else:
        (folder / f"{MODE}.py").mkdir(parents=True)
    with pytest.raises(CacheError) as raised:
        normforge.layernorm2d_fwd(torch.randn(2, 64), **ASK)
    message = str(raised.value)
    assert message.startswith(f"no kernel for {MODE} is loaded, and none can be generated into {folder}")
    assert "set NORMFORGE_CACHE to a folder that can be written" in message
    assert isinstance(raised.value, OSError)
    # What is in the table needs no cache, and nothing half-made is left behind.
    check("layer", torch.randn(2, 64))
    assert not list(empty_cache.glob("**/.*"))


def test_the_strict_policy(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_ON_MISS", "error")
    x = torch.randn(2, 64)
    not_served(MissingInstanceError)
    check("layer", x)
    assert not empty_cache.exists()
    for policy in ("generate", ""):
        monkeypatch.setenv("NORMFORGE_ON_MISS", policy)
        check("layer", x, **ASK)
    # What was generated before is missing too.
    monkeypatch.setenv("NORMFORGE_ON_MISS", "error")
    not_served(MissingInstanceError)


def test_a_policy_that_is_none(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_ON_MISS", "ERROR")
    not_served(SettingError, r"NORMFORGE_ON_MISS='ERROR' is no policy.*'generate'.*or 'error'")


@pytest.mark.parametrize(
    ("umask", "folder_mode", "file_mode"),
    [(0o022, 0o755, 0o644), (0o027, 0o750, 0o640), (0o077, 0o700, 0o600), (0o000, 0o775, 0o664)],
)
def test_others_may_read_the_cache_as_the_umask_says(
    umask: int, folder_mode: int, file_mode: int, empty_cache: Path
) -> None:
    """And never write to it, whatever the umask says: code is imported from there."""
    before = os.umask(umask)
    try:
        miss()
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (empty_cache, *empty_cache.rglob("*"))}
    assert modes == {path: file_mode if path.is_file() else folder_mode for path in modes}


@pytest.mark.usefixtures("filled")
def test_a_cache_that_root_filled_is_used_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_ROOT", os.getuid())
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a file was written"))
    miss()


def refused(why: str, folder: Path) -> None:
    """A call whose kernel has to be generated into a folder is refused for a reason."""
    with pytest.raises(CacheError) as raised:
        miss()
    assert str(raised.value) == (
        f"{why}, and kernels are imported from {folder}; set NORMFORGE_CACHE to a folder of your own that no other "
        "user may write to"
    )


@pytest.mark.parametrize("which", ["above", "cache", "folder"])
def test_a_folder_that_everybody_may_write_to_is_no_cache(which: str, filled: Path) -> None:
    path = {"above": filled.parent.parent, "cache": filled.parent, "folder": filled}[which]
    path.chmod(0o777)
    refused(f"{path} can be written by everybody (chmod o-w {path} ends that)", filled)
    path.chmod(0o1777)
    if which == "folder":
        refused(f"{path} can be written by everybody (chmod o-w {path} ends that)", filled)
    else:
        # As /tmp is: only its owner can rename or remove what is in it.
        miss()


@pytest.mark.parametrize("mode", [0o755, 0o1777])
@pytest.mark.parametrize("which", ["cache", "folder"])
def test_what_another_user_owns_is_no_cache(
    which: str, mode: int, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns a folder may put another in its place, or other files into it, whatever its permissions say."""
    filled.parent.chmod(mode)
    path = filled.parent if which == "cache" else filled
    stranger = path.lstat().st_ino
    lstat = Path.lstat

    def owned(self: Path) -> os.stat_result:
        about = lstat(self)
        fields = list(about)
        fields[stat.ST_UID] = 54321 if about.st_ino == stranger else about.st_uid
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", owned)
    refused(f"{path} belongs to user 54321", filled)


def test_a_link_in_the_cache_is_not_followed(filled: Path, tmp_path: Path) -> None:
    """Where everybody may write, it could lead to any folder of the user's."""
    filled.rename(tmp_path / "elsewhere")
    filled.symlink_to(tmp_path / "elsewhere")
    refused(f"{filled} is a symbolic link", filled)


@THOROUGH
def test_bytecode_in_the_cache_is_neither_read_nor_written(tmp_path: Path) -> None:
    """With an umask of 0 Python makes a __pycache__ that everybody may write to, beside sources that were checked."""
    cache = tmp_path / "cache"
    assert printed(f"import os; os.umask(0){CALL}", NORMFORGE_CACHE=str(cache)).splitlines()[-1] == Q
    folder = folder_of(cache)
    assert not (folder / "__pycache__").exists()
    for name in (f"{MODE}.py", "__init__.py", "primitives.py"):
        where = Path(importlib.util.cache_from_source(str(folder / name)))
        where.parent.mkdir(exist_ok=True)
        spoilt = tmp_path / name
        spoilt.write_text("print('spoilt')\n")
        py_compile.compile(
            str(spoilt), str(where), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, doraise=True
        )
    assert printed(CALL, NORMFORGE_CACHE=str(cache)).splitlines() == [Q]


def test_what_was_generated_does_not_outlive_the_table(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    miss()
    normforge.load_instances(write(tmp_path / "mine", [instance(PLAIN, 64)]))
    assert [entry.name for entry in normforge.instances()] == ["ln_fwd_fp32_n128"]
    monkeypatch.setenv("NORMFORGE_ON_MISS", "error")
    not_served(MissingInstanceError)


@THOROUGH
def test_a_relative_cache_stays_where_it_was_named_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = f"import os, normforge; os.chdir('/'){CALL}"
    assert printed(code, NORMFORGE_CACHE="cache").splitlines()[0].startswith(f"generated {MODE}_n128 into {tmp_path}")


@THOROUGH
def test_processes_that_miss_at_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    left = "print(*(path.name for path in normforge.selection.on_demand.cache_folder().glob('.*')))"
    imports = "import triton, jinja2, normforge.selection.on_demand"
    outputs = printed_at_once(imports, [f"{CALL}{left}"] * 4, tmp_path, NORMFORGE_CACHE=str(cache))
    said = [line for out in outputs for line in out.splitlines()[:-2]]
    assert said
    assert all(line.startswith(f"generated {MODE}_n128") for line in said)
    # No temporary files are left.
    assert [out.splitlines()[-2:] for out in outputs] == [[Q, ""]] * 4
    assert set(files(folder_of(cache))) == {*SHARED, f"{MODE}.py"}


def test_threads_that_miss_at_once(empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without rows nothing is launched, because Triton's interpreter runs one kernel at a time."""
    caplog.set_level(logging.INFO, logger="normforge")
    before = len(normforge.instances())

    def call(n: int) -> None:
        for step in range(20):
            normforge.layernorm2d_fwd(torch.empty(0, n), **ASK, save_mv=step % 2 == 0)
            normforge.instances()

    in_threads(call, (64, 64, 64, 200, 200, 300, 300, 1500))
    made = [entry.name for entry in normforge.instances()][before:]
    buckets = ("n128", "n256", "n512", "n1536")
    assert sorted(made) == sorted(f"{MODE}{mv}_{bucket}" for mv in ("", "_mv") for bucket in buckets)
    # Once for each module that was written; the other buckets of a mode are in it.
    assert len(caplog.records) == 2
    check("layer", torch.randn(2, 64), **ASK)
