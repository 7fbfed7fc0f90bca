"""An output folder: what is planned, what is done, and what a run that is cut off leaves behind."""

from __future__ import annotations

import ast
import errno
import os
import runpy
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from normforge.codegen import folder as folder_module
from normforge.codegen.emit import MARKER, render_folder
from normforge.codegen.errors import FolderError
from normforge.codegen.folder import Plan, plan
from normforge.codegen.manifest import Manifest
from normforge.codegen.select import select


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


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def modes(table: Path) -> set[str]:
    return set(runpy.run_path(str(table))["TABLE"])


def test_everything_is_missing_from_a_folder_that_is_not_there(folder: Path, old: dict[str, str]) -> None:
    planned = plan(folder, old)
    assert planned == Plan(folder, old, missing=tuple(old), changed=(), unchanged=(), stale=(), foreign=())
    assert not planned.is_clean
    assert not folder.exists()


def test_apply_makes_the_folder_what_was_rendered(folder: Path, old: dict[str, str], new: dict[str, str]) -> None:
    plan(folder, old).apply()
    assert contents(folder) == old
    planned = plan(folder, new)
    assert planned.missing == ("rms_fwd_fp16.py", "rms_fwd_bf16.py")
    assert set(planned.changed) == {"primitives.py", "ln_fwd_fp16.py", "dispatch.py"}
    assert planned.unchanged == ("__init__.py", "ln_fwd_bf16.py")
    assert planned.stale == ("ln_fwd_bf16_int8_dq.py", "ln_fwd_bf16_int8_sdq.py")
    planned.apply()
    assert contents(folder) == new
    assert plan(folder, new).is_clean


def test_a_folder_is_made_with_its_parents(tmp_path: Path, old: dict[str, str]) -> None:
    plan(tmp_path / "a" / "b", old).apply()
    assert contents(tmp_path / "a" / "b") == old


def test_unchanged_files_are_not_touched(folder: Path, old: dict[str, str]) -> None:
    plan(folder, old).apply()
    before = {path.name: path.stat() for path in folder.iterdir()}
    plan(folder, old).apply()
    after = {path.name: path.stat() for path in folder.iterdir()}
    assert {name: (s.st_mtime_ns, s.st_ino) for name, s in after.items()} == {
        name: (s.st_mtime_ns, s.st_ino) for name, s in before.items()
    }


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


def test_pythons_cache_is_nobodys(folder: Path, old: dict[str, str]) -> None:
    plan(folder, old).apply()
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "dispatch.cpython-311.pyc").touch()
    assert plan(folder, old).is_clean


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


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_where_the_folder_should_be(tmp_path: Path, old: dict[str, str], below: str) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(FolderError) as caught:
        plan(path / below, old)
    assert str(caught.value) == f"{path / below} is a file or lies under one; choose a folder with --out"


class Steps:
    """Counts what a run does to files, and raises an error in place of a chosen step."""

    def __init__(self, stop: int | None = None, error: BaseException | None = None) -> None:
        self.stop = stop
        self.error = error
        self.taken = 0

    def step(self) -> None:
        self.taken += 1
        if self.error is not None and self.taken - 1 == self.stop:
            raise self.error

    @contextmanager
    def patched(self) -> Iterator[None]:
        write, replace, unlink = Path.write_bytes, Path.replace, Path.unlink

        def half_then_whole(path: Path, data: bytes) -> None:
            write(path, data[: len(data) // 2])
            self.step()
            write(path, data)

        def replace_after(path: Path, target: Path) -> None:
            self.step()
            replace(path, target)

        def unlink_after(path: Path, missing_ok: bool = False) -> None:
            if path.suffix == ".py":
                self.step()
            unlink(path, missing_ok)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "write_bytes", half_then_whole)
            patch.setattr(Path, "replace", replace_after)
            patch.setattr(Path, "unlink", unlink_after)
            yield


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), FolderError),
    ],
    ids=["interrupt", "full_disk"],
)
def test_a_run_cut_off_anywhere_leaves_a_table_that_imports(
    tmp_path: Path, old: dict[str, str], new: dict[str, str], error: BaseException, raised: type[BaseException]
) -> None:
    whole = Steps()
    plan(tmp_path / "whole", old).apply()
    with whole.patched():
        plan(tmp_path / "whole", new).apply()
    # Two modules are new, two and the table change: each is written, then put in place. Two are removed.
    assert whole.taken == 5 + 5 + 2

    tables = []
    for stop in range(whole.taken):
        folder = tmp_path / str(stop)
        plan(folder, old).apply()
        with Steps(stop, error).patched(), pytest.raises(raised):
            plan(folder, new).apply()

        left = contents(folder)
        tables.append(left["dispatch.py"])
        assert not [name for name in left if not name.endswith(".py")]
        for text in left.values():
            ast.parse(text)
        assert {f"{mode}.py" for mode in modes(folder / "dispatch.py")} <= left.keys()
        if stop < 5:
            assert left == old

        plan(folder, new).apply()
        assert contents(folder) == new

    assert tables == [old["dispatch.py"]] * 10 + [new["dispatch.py"]] * 2


def test_runs_at_once_go_one_after_the_other(folder: Path, old: dict[str, str], new: dict[str, str]) -> None:
    """At any moment a reader finds the old table or the new one, and the modules that it names."""
    plan(folder, old).apply()
    failures: list[BaseException] = []

    def write(files: dict[str, str]) -> None:
        try:
            for _ in range(20):
                plan(folder, files).apply()
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=(files,)) for files in (old, new)]
    for writer in writers:
        writer.start()
    tables = {text["dispatch.py"] for text in (old, new)}
    while any(writer.is_alive() for writer in writers):
        assert (folder / "dispatch.py").read_text() in tables
    assert not failures
    assert contents(folder) in (old, new)


def test_a_run_waits_for_one_that_is_under_way(
    folder: Path, old: dict[str, str], new: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other has written beside its place is no rubbish to be removed."""
    write = Path.write_bytes
    others: list[threading.Thread] = []

    def write_and_let_another_begin(path: Path, data: bytes) -> None:
        write(path, data)
        if not others:
            others.append(threading.Thread(target=lambda: plan(folder, new).apply()))
            others[0].start()
            others[0].join(0.5)

    monkeypatch.setattr(Path, "write_bytes", write_and_let_another_begin)
    plan(folder, old).apply()
    others[0].join()
    assert contents(folder) == new


def test_a_module_keeps_its_kernels_until_the_table_names_them_no_more(
    tmp_path: Path, expand: Callable[[str], Manifest]
) -> None:
    """Wherever a run is cut off, each kernel that the folder's table names is there."""
    short, long = (
        render_folder(expand(f"groups: {{a: {{norm: layer, dtype_in: bf16, n: {n}}}}}").instances)
        for n in ("n128", "[n128, n65536]")
    )
    for before, after in ((long, short), (short, long)):
        whole = Steps()
        plan(tmp_path / "whole", before).apply()
        with whole.patched():
            plan(tmp_path / "whole", after).apply()
        for stop in range(whole.taken):
            folder = tmp_path / "cut"
            plan(folder, before).apply()
            with Steps(stop, KeyboardInterrupt()).patched(), pytest.raises(KeyboardInterrupt):
                plan(folder, after).apply()
            table = runpy.run_path(str(folder / "dispatch.py"))["TABLE"]
            named = {tile[0] for ladder in table["ln_fwd_bf16"].values() for row in ladder for tile in row[3:]}
            module = (folder / "ln_fwd_bf16.py").read_text()
            assert not [word for word in named if f"def ln_fwd_bf16_{word}(" not in module]
        plan(folder, after).apply()
        assert contents(folder) == after


def test_what_is_up_to_date_is_not_locked(folder: Path, old: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be read-only."""
    plan(folder, old).apply()
    monkeypatch.setattr(folder_module, "locked", lambda path: pytest.fail("it was locked"))
    plan(folder, old).apply()


def test_the_lock_of_a_killed_run_is_nobodys(folder: Path, old: dict[str, str], new: dict[str, str]) -> None:
    plan(folder, old).apply()
    (folder / ".normforge-lock").touch()
    assert plan(folder, old).is_clean
    plan(folder, new).apply()
    assert contents(folder) == new


def test_a_path_that_is_none(old: dict[str, str]) -> None:
    with pytest.raises(FolderError, match="is no path"):
        plan(Path("a\0b"), old)


def test_a_first_run_cut_off_leaves_no_table_or_a_whole_one(folder: Path, old: dict[str, str]) -> None:
    for stop in range(2 * len(old)):
        with Steps(stop, KeyboardInterrupt()).patched(), pytest.raises(KeyboardInterrupt):
            plan(folder, old).apply()
        assert not (folder / "dispatch.py").exists()
        for path in folder.iterdir():
            path.unlink()


def test_an_unwritable_folder(tmp_path: Path, folder: Path, old: dict[str, str]) -> None:
    refusal = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with Steps(0, refusal).patched(), pytest.raises(FolderError) as caught:
        plan(folder, old).apply()
    assert str(caught.value) == (
        f"{folder} cannot be written: Permission denied; mend that and run again, or choose another folder with --out"
    )
