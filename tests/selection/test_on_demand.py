"""What the loaded table lacks is generated into the user's cache, once, safely, and by this version alone."""

from __future__ import annotations

import importlib.util
import logging
import os
import py_compile
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge import settings
from normforge.codegen import emit
from normforge.codegen.model import Mode
from normforge.errors import CacheError, MissingInstanceError, SettingError
from normforge.selection import dispatch, on_demand

from ..calling import check, each_norm, each_pipeline, printed, printed_at_once
from ..folders import PLAIN, instance, write
from ..thorough import THOROUGH

# A legal mode that the committed table does not hold, and the call that asks for it.
MODE = "ln_fwd_fp32_int8_dq_trunc"
ASK: dict[str, Any] = {"fquant": "dynamic", "rounding": "truncate"}

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


@pytest.fixture
def filled(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache that an earlier process filled: this one has imported nothing from there."""
    miss()
    monkeypatch.setattr(dispatch, "_generated", dispatch._NOTHING)
    monkeypatch.setattr(dispatch, "plans", {})
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
    monkeypatch.setenv("NORMFORGE_CACHE", str(tmp_path / "mine"))
    assert on_demand.cache_folder().parent == tmp_path / "mine"
    monkeypatch.setenv("NORMFORGE_CACHE", "")
    assert on_demand.cache_folder().parent == tmp_path / "xdg" / "normforge"
    monkeypatch.delenv("NORMFORGE_CACHE")
    assert on_demand.cache_folder().parent == tmp_path / "xdg" / "normforge"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NORMFORGE_CACHE", "~/mine")
    assert on_demand.cache_folder().parent == tmp_path / "mine"


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
    for function in (normforge.layernorm2d_fwd, normforge.which):
        with pytest.raises(MissingInstanceError):
            function(x, **ASK)
    check("layer", x)
    assert not empty_cache.exists()
    for policy in ("generate", ""):
        monkeypatch.setenv("NORMFORGE_ON_MISS", policy)
        check("layer", x, **ASK)
    # What was generated before is missing too.
    monkeypatch.setenv("NORMFORGE_ON_MISS", "error")
    with pytest.raises(MissingInstanceError):
        normforge.which(x, **ASK)


def test_a_policy_that_is_none(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_ON_MISS", "ERROR")
    for function in (normforge.layernorm2d_fwd, normforge.which):
        with pytest.raises(SettingError, match=r"NORMFORGE_ON_MISS='ERROR' is no policy.*'generate'.*or 'error'"):
            function(torch.randn(2, 64), **ASK)


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
    code = f"import os; os.umask(0){CALL}"
    assert printed(code, NORMFORGE_CACHE=str(cache)).splitlines()[-1] == Q
    folder = folder_of(cache)
    assert not (folder / "__pycache__").exists()
    for name in (f"{MODE}.py", "__init__.py", "primitives.py"):
        source = folder / name
        where = Path(importlib.util.cache_from_source(str(source)))
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
    for function in (normforge.layernorm2d_fwd, normforge.which):
        with pytest.raises(MissingInstanceError):
            function(torch.empty(0, 64), **ASK)


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
    start = threading.Barrier(8)

    def call(n: int) -> None:
        start.wait()
        for step in range(20):
            normforge.layernorm2d_fwd(torch.empty(0, n), **ASK, save_mv=step % 2 == 0)
            normforge.instances()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, (64, 64, 64, 200, 200, 300, 300, 1500)))
    made = [entry.name for entry in normforge.instances()][before:]
    buckets = ("n128", "n256", "n512", "n1536")
    assert sorted(made) == sorted(f"{MODE}{mv}_{bucket}" for mv in ("", "_mv") for bucket in buckets)
    # Once for each module that was written; the other buckets of a mode are in it.
    assert len(caplog.records) == 2
    check("layer", torch.randn(2, 64), **ASK)
