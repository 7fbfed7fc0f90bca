"""The command line: what each verb prints, writes and returns, and which files of an output folder stay."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from normforge.codegen import calls, cli
from normforge.codegen import folder as folder_module
from normforge.codegen.emit import MARKER, render_folder
from normforge.codegen.errors import FolderError
from normforge.codegen.folder import plan
from normforge.codegen.manifest import Manifest, load
from normforge.codegen.select import select

from ..calling import Outcome, command, outcome_of
from ..thorough import THOROUGH
from .conftest import TWO_GROUPS, contents

Generate = Callable[..., Outcome]


@pytest.fixture
def generate(tmp_path: Path, file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Generate:
    """Run the generator on the two-group manifest, from its folder."""
    file(TWO_GROUPS)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, manifest: str = "mine.yaml") -> Outcome:
        return outcome_of(cli.main, ["--manifest", manifest, *arguments])

    return run


def test_a_run_writes_what_the_manifest_asks_for_and_says_so(generate: Generate, two_groups: Manifest) -> None:
    outcome = generate("--out", "kernels")
    assert outcome == (0, "12 instances in 6 modules: 9 files written, 0 unchanged, 0 removed in kernels\n", "")
    assert contents("kernels") == render_folder(two_groups.instances)
    assert generate("--out", "kernels", "--check") == (0, "12 instances in 6 modules: kernels is up to date\n", "")


def test_a_selection_given_several_times_is_one(generate: Generate, two_groups: Manifest) -> None:
    several = ("--filter", "rms*big", "--filter", "ln_*", "--where", "dtype_in=fp16", "--where", "n>1024")
    once = ("--filter", "rms*big,ln_*", "--where", "dtype_in=fp16,n>1024")
    assert generate("--list", *several).out == generate("--list", *once).out
    assert len(generate("--list", *several).out.splitlines()) == 2


def test_several_manifests_make_what_any_of_them_asks_for(generate: Generate) -> None:
    buckets = "buckets: {n1024: 1..1024, nbig: 1025..}\n"
    Path("more.yaml").write_text(
        f"{buckets}groups:\n  more: {{norm: rms, dtype_in: [fp32, bf16], n: nbig}}\n", encoding="utf-8"
    )
    both = generate("--manifest", "more.yaml", "--list").out.splitlines()
    alone = generate("--list").out.splitlines()
    assert [line.split()[0] for line in both[: len(alone)]] == [line.split()[0] for line in alone]
    # What both ask for is there once.
    assert [line.split()[0] for line in both[len(alone) :]] == ["rms_fwd_fp32_nbig"]
    assert generate("--manifest", "mine.yaml", "--list").out.splitlines() == alone
    Path("more.yaml").write_text("groups:\n  more: {norm: rms, dtype_in: fp32}\n", encoding="utf-8")
    outcome = generate("--manifest", "more.yaml", "--list")
    assert outcome.status == 2
    assert (
        "mine.yaml and more.yaml have different buckets, and a table has one ladder; give both the same" in outcome.err
    )


def test_the_files_of_a_build_are_listed_before_there_are_any(generate: Generate) -> None:
    listed = generate("--out", "kernels", "--list-files").out.splitlines()
    assert not Path("kernels").exists()
    generate("--out", "kernels")
    assert listed == sorted(str(path) for path in Path("kernels").iterdir())
    # What is there already is listed too, and what a narrower build would remove is not.
    assert len(generate("--out", "kernels", "--filter", "ln_*", "--list-files").out.splitlines()) == 7


def test_list_prints_a_line_for_each_instance(generate: Generate, two_groups: Manifest) -> None:
    outcome = generate("--list")
    assert (outcome.status, outcome.err) == (0, "")
    rows = [re.split(r"  +", line, maxsplit=1) for line in outcome.out.splitlines()]
    assert rows == [[instance.name, instance.summary] for instance in two_groups.instances]


def test_count_counts_by_group_and_axis(generate: Generate) -> None:
    outcome = generate("--count")
    assert (outcome.status, outcome.err) == (0, "")
    rows = [line.split() for line in outcome.out.splitlines()]
    for row in ("plain 4 8", "total 6 12", "norm rms 2 4", "dtype_out int8 2 4", "n nbig (1025..) 6 6"):
        assert rows.count(row.split()) == 1


def test_dry_run_names_what_a_run_would_do_and_does_nothing(generate: Generate) -> None:
    generate("--out", "kernels", "--where", "fquant=none")
    before = contents("kernels")
    outcome = generate("--out", "kernels", "--where", "norm=layer", "--dry-run")
    assert outcome == (
        0,
        "write   ln_fwd_bf16_int8_sdq.py\n"
        "write   ln_fwd_bf16_int8_dq.py\n"
        "change  dispatch.py\n"
        "remove  rms_fwd_bf16.py\n"
        "remove  rms_fwd_fp16.py\n"
        "8 instances in 4 modules: would write 2 files, change 1, remove 2 and leave 4 in kernels\n",
        "",
    )
    assert contents("kernels") == before


def test_check_shows_missing_changed_and_stale_files_and_the_command_that_mends_them(
    generate: Generate, two_groups: Manifest
) -> None:
    generate("--out", "my kernels")
    (Path("my kernels") / "rms_fwd_fp16.py").unlink()
    module = Path("my kernels") / "ln_fwd_fp16.py"
    module.write_text(module.read_text() + "# by hand\n")
    stale = Path("my kernels") / "old.py"
    stale.write_text("# Generated by normforge\n")
    before = contents("my kernels")

    outcome = generate("--out", "my kernels", "--check")

    assert outcome.status == 1
    assert outcome.out.count("\n+++ ") == 3
    assert outcome.err == (
        "my kernels differs from mine.yaml: 1 missing, 1 changed, 1 stale; to bring it up to date: "
        "python generate.py --manifest mine.yaml --out 'my kernels'\n"
    )
    assert contents("my kernels") == before
    mended = "12 instances in 6 modules: 2 files written, 7 unchanged, 1 removed in my kernels\n"
    assert generate("--out", "my kernels").out == mended
    assert contents("my kernels") == render_folder(two_groups.instances)
    (Path("my kernels") / "notes.txt").touch()
    assert "1 not made by normforge (notes.txt), to be moved" in generate("--out", "my kernels", "--check").err


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--out", "kernels", "--filter", "lm_*"], "--filter 'lm_*' matches no instance; the nearest are ln_fwd_"),
        (["--list", "--where", "norm=rms,fquant=dynamic"], "--where 'fquant=dynamic' leaves none of the 4 instances"),
        (["--out", "mine.yaml"], "mine.yaml is a file or lies under one"),
        (["--out", "."], ". holds files that normforge did not make: mine.yaml; nothing was written or removed. Move"),
        (["--out", ".", "--dry-run"], ". holds files that normforge did not make: mine.yaml; nothing was written or"),
        (["--list", "--manifest", "no.yaml"], "no.yaml"),
    ],
    ids=["filter", "where", "out", "foreign", "foreign_dry_run", "manifest"],
)
def test_a_request_that_cannot_be_met_is_one_message(generate: Generate, arguments: list[str], start: str) -> None:
    status, out, err = generate(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"python generate.py: error: {start}")
    assert err.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["mine.yaml"]


run = partial(command, sys.executable)


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_script_writes_the_same_bytes_in_any_process_and_from_anywhere(
    repository: Path, tmp_path: Path, seed: str
) -> None:
    ran = run(str(repository / "generate.py"), "--out", "kernels", cwd=tmp_path, PYTHONHASHSEED=seed)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert contents(tmp_path / "kernels") == render_folder(load(repository / "instances.yaml").instances)


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """A checkout whose own manifest asks for two modes, with a manifest for one of the two beside it."""
    for name in ("codegen", "templates"):
        shutil.copytree(repository / name, tmp_path / name)
    shutil.copy(repository / "generate.py", tmp_path)
    for name, dtypes in (("instances.yaml", "[fp16, bf16]"), ("mine.yaml", "fp16")):
        (tmp_path / name).write_text(f"groups:\n  few: {{norm: rms, dtype_in: {dtypes}, n: 4096}}\n")
    return tmp_path


@THOROUGH
@pytest.mark.parametrize(
    ("narrower", "what"), [(("--filter", "*_fp16_*"), "selection"), (("--manifest", "mine.yaml"), "manifest")]
)
def test_nothing_is_removed_from_a_checkouts_own_folder_unless_asked(
    checkout: Path, narrower: tuple[str, str], what: str
) -> None:
    """Others may have the folder under version control."""
    ran = run("generate.py", cwd=checkout)
    assert ran.stdout == "2 instances in 2 modules: 8 files written, 0 unchanged, 0 removed in generated\n"
    before = contents(checkout / "generated")
    refused = run("generate.py", *narrower, cwd=checkout)
    assert (refused.returncode, refused.stdout, refused.stderr) == (
        2,
        "",
        f"python generate.py: error: this {what} would remove 1 file from generated and change 1; nothing was written "
        "or removed. Name another folder with --out, look with --dry-run, or confirm with --prune\n",
    )
    for harmless in ((*narrower, "--out", "kernels"), (*narrower, "--dry-run"), ("--check",)):
        assert run("generate.py", *harmless, cwd=checkout).returncode == 0
    assert contents(checkout / "generated") == before
    assert run("generate.py", *narrower, "--prune", cwd=checkout).returncode == 0
    drifted = run("generate.py", "--check", cwd=checkout)
    assert drifted.returncode == 1
    assert drifted.stderr.endswith("to bring it up to date: python generate.py\n")


@THOROUGH
def test_a_checkout_regenerates_the_runtimes_public_functions(repository: Path, checkout: Path) -> None:
    for each in calls.TEMPLATES:
        (checkout / each).parent.mkdir(parents=True, exist_ok=True)
    for told, verb in ((("--dry-run",), "would be written"), ((), "written")):
        said = "".join(f"{name}: {verb}\n" for name in calls.TEMPLATES)
        assert run("generate.py", *told, cwd=checkout).stdout.endswith(said)
    for each in calls.TEMPLATES:
        assert (checkout / each).read_text() == (repository / each).read_text()
    assert run("generate.py", "--check", cwd=checkout).returncode == 0
    name = "runtime/families/public.py"
    path = checkout / name
    path.write_text(path.read_text().replace("native.calls", "native"))
    drifted = run("generate.py", "--check", cwd=checkout)
    assert drifted.returncode == 1
    assert f"--- {name}" in drifted.stdout
    assert drifted.stderr.startswith(f"{name} differs from its template; to bring it up to date: python generate")
    # With a folder of one's own, nothing else is touched.
    assert run("generate.py", "--out", "mine", cwd=checkout).stdout.count("\n") == 1


def test_an_installed_generator_needs_a_manifest_and_a_folder(repository: Path, tmp_path: Path) -> None:
    # Laid out as a wheel is, where nothing named instances.yaml lies beside the package; test_wheel.py builds with one.
    site = tmp_path / "site"
    for name in ("codegen", "templates"):
        shutil.copytree(repository / name, site / "normforge" / name)
    (tmp_path / "mine.yaml").write_text(TWO_GROUPS)
    call = "import sys; from normforge.codegen.cli import main; sys.exit(main(prog='normforge generate'))"

    def installed(*arguments: str) -> tuple[int, str, str]:
        ran = run("-c", call, *arguments, cwd=tmp_path, PYTHONPATH=str(site))
        return ran.returncode, ran.stdout, ran.stderr.splitlines()[-1] if ran.stderr else ""

    lacks = "normforge generate: error: an installed normforge has no {} of its own; name a {}".format
    for given, *missing in (
        (("--out", "kernels"), "instances.yaml", "manifest: --manifest FILE"),
        (("--manifest", "mine.yaml"), "generated/", "folder: --out DIR"),
    ):
        assert installed(*given) == (2, "", lacks(*missing))


@pytest.mark.parametrize("arguments", ["generate.py --list", "generate.py --count", "-m normforge list"])
def test_a_reader_that_leaves_early_is_no_error(repository: Path, arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        # Buffered, so that something is left to flush at exit.
        ran = run(*arguments.split(), cwd=repository, out=writer, PYTHONUNBUFFERED="")
    finally:
        os.close(writer)
    assert (ran.returncode, ran.stderr) == (0, "")


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
    """It may be read-only; Python's cache in it is nobody's."""
    plan(folder, old).apply()
    (folder / "__pycache__").mkdir()
    monkeypatch.setattr(folder_module, "locked", lambda path: pytest.fail("it was locked"))
    plan(folder, old).apply()


def test_a_run_that_fails_while_it_writes_changes_nothing(
    folder: Path, old: dict[str, str], new: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(folder, old).apply()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", Mock(side_effect=OSError(errno.ENOSPC, "No space")))
        with pytest.raises(
            FolderError, match="kernels cannot be written: No space; mend that and run again, or choose"
        ):
            plan(folder, new).apply()
    assert contents(folder) == old
