"""An output folder: what is planned, what is done, and whose files stay; tests/fire/test_interrupted.py kills runs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from normforge.codegen import folder as folder_module
from normforge.codegen.emit import MARKER, render_folder
from normforge.codegen.errors import FolderError
from normforge.codegen.folder import plan
from normforge.codegen.manifest import Manifest
from normforge.codegen.select import select

from .conftest import contents


@pytest.fixture
def old(two_groups: Manifest) -> dict[str, str]:
    return render_folder(select(two_groups, None, "norm=layer").instances)


@pytest.fixture
def new(two_groups: Manifest) -> dict[str, str]:
    """Shares modules with `old`, some of them changed, and lacks and adds others."""
    files = render_folder(select(two_groups, None, "fquant=none").instances)
    for name in ("primitives.py", "ln_fwd_fp16.py"):
        files[name] += "# changed\n"
    return files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


def test_files_have_the_permissions_of_any_new_file(folder: Path, old: dict[str, str]) -> None:
    before = os.umask(0o027)
    try:
        plan(folder, old).apply()
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: (folder / "notes.txt").write_text("mine"),
        lambda folder: (folder / "dispatch.py").write_text("TABLE = {}\n"),
        lambda folder: (folder / "late.py").write_text("\n" * 5 + f"# {MARKER}\n"),
        lambda folder: (folder / "sub").mkdir(),
        lambda folder: (folder / "ln_fwd_fp16.py").unlink() or (folder / "ln_fwd_fp16.py").mkdir(),
        lambda folder: (folder / "link.py").symlink_to(folder / "dispatch.py"),
    ],
    ids=["text", "table_without_marker", "marker_too_late", "folder", "folder_in_a_modules_place", "link"],
)
def test_files_of_somebody_elses_are_refused_and_kept(
    folder: Path, old: dict[str, str], new: dict[str, str], make: Callable[[Path], object]
) -> None:
    plan(folder, old).apply()
    make(folder)
    before = sorted((path.name, path.is_file() and path.read_bytes()) for path in folder.iterdir())
    planned = plan(folder, new)
    assert len(planned.foreign) == 1
    assert set(planned.missing) == new.keys() - old.keys()
    assert not planned.is_clean
    with pytest.raises(FolderError) as caught:
        planned.apply()
    assert str(caught.value) == (
        f"{folder} holds files that normforge did not make: {planned.foreign[0]}; nothing was written or removed. "
        "Move them elsewhere, or choose another folder with --out"
    )
    assert sorted((path.name, path.is_file() and path.read_bytes()) for path in folder.iterdir()) == before


def test_a_crowd_of_foreign_files_is_listed_in_short(folder: Path, old: dict[str, str]) -> None:
    folder.mkdir()
    for index in range(12):
        (folder / f"{index:02}.txt").touch()
    with pytest.raises(FolderError, match=r"did not make: 00.txt, .*09.txt and 2 more;"):
        plan(folder, old).apply()


def test_what_a_killed_run_left_is_removed(folder: Path, old: dict[str, str]) -> None:
    plan(folder, old).apply()
    (folder / "dispatch.py.0123abcd.normforge-tmp").write_text("half a l")
    planned = plan(folder, old)
    assert planned.stale == ("dispatch.py.0123abcd.normforge-tmp",)
    planned.apply()
    assert contents(folder) == old


def test_the_diff_turns_what_is_there_into_what_should_be(folder: Path) -> None:
    plan(folder, {"gone.py": f"# {MARKER}\nold\n", "kept.py": f"# {MARKER}\r\nsame"}).apply()
    planned = plan(folder, {"kept.py": f"# {MARKER}\nsame\n", "new.py": f"# {MARKER}\n"})
    assert "".join(planned.diff()) == (
        f"--- /dev/null\n+++ {folder}/new.py\n@@ -0,0 +1 @@\n+# {MARKER}\n"
        f"--- {folder}/kept.py\n+++ {folder}/kept.py\n@@ -1,2 +1,2 @@\n"
        f"-# {MARKER}\r\n-same\n\\ No newline at end of file\n+# {MARKER}\n+same\n"
        f"--- {folder}/gone.py\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-# {MARKER}\n-old\n"
    )


def test_what_is_up_to_date_is_not_locked(folder: Path, old: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be read-only."""
    plan(folder, old).apply()
    monkeypatch.setattr(folder_module, "locked", lambda path: pytest.fail("it was locked"))
    plan(folder, old).apply()


def test_pythons_cache_and_the_lock_of_a_killed_run_are_nobodys(
    folder: Path, old: dict[str, str], new: dict[str, str]
) -> None:
    plan(folder, old).apply()
    (folder / "__pycache__").mkdir()
    (folder / ".normforge-lock").touch()
    assert plan(folder, old).is_clean
    plan(folder, new).apply()
    (folder / "__pycache__").rmdir()
    assert contents(folder) == new


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt("stopped"), "^stopped$"),
        (OSError(errno.ENOSPC, "No space"), "kernels cannot be written: No space; mend that and run again, or choose"),
    ],
)
def test_a_run_that_fails_while_it_writes_changes_nothing(
    folder: Path, old: dict[str, str], new: dict[str, str], error: BaseException, raised: str
) -> None:
    plan(folder, old).apply()
    write = Path.write_bytes

    def write_half(path: Path, data: bytes) -> None:
        write(path, data[: len(data) // 2])
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_half)
        with pytest.raises((KeyboardInterrupt, FolderError), match=raised):
            plan(folder, new).apply()
    assert contents(folder) == old
