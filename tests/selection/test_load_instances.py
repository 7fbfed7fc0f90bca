"""A table of the user's own instead of the committed one, and what is said of what it lacks."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge.codegen import manifest
from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.values import DType, FusedQuant, Norm, Pipeline
from normforge.errors import MissingInstanceError, TableError
from normforge.selection import dispatch
from normforge.selection.table import FORMAT

from ..calling import check, printed, table_at
from ..folders import PLAIN, RMS, instance, write

pytestmark = pytest.mark.usefixtures("_strict")


@pytest.fixture
def _strict(fresh_table: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh table beside which nothing is generated: what a table does not hold is missing."""
    monkeypatch.setenv("NORMFORGE_ON_MISS", "error")


def names() -> list[str]:
    return [entry.name for entry in normforge.instances()]


def test_the_folder_is_what_runs(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", [instance(PLAIN, 64)])
    spoil(folder, "ln_fwd_fp32.py", "store_chunk(y_ptr, cols, y, mask)", "store_chunk(y_ptr, cols, y + 1, mask)")
    x = torch.randn(3, 64)
    committed = normforge.layernorm2d_fwd(x).y
    normforge.load_instances(folder)
    torch.testing.assert_close(normforge.layernorm2d_fwd(x).y, committed + 1)


@pytest.mark.parametrize("named", ["mine", "~/mine"])
def test_a_name_stays_right_when_the_process_moves(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "mine", [instance(PLAIN, 64)])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    normforge.load_instances(named)
    monkeypatch.chdir("/")
    check("layer", torch.randn(3, 64))


def test_a_folder_made_anew_is_loaded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when both were written within one second and are of one size, which is all a bytecode cache looks at."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    usual, other = (instance(PLAIN, 64, Tile(Pipeline.ROWS, rows, 128, 2)) for rows in (16, 32))
    folder = tmp_path / "mine"
    for made in (usual, other, usual):
        write(folder, [made])
        os.utime(folder / "dispatch.py", (1e9, 1e9))
        normforge.load_instances(folder)
        assert [entry.tile(1, 128, "cpu").rows for entry in normforge.instances()] == [made.tile.rows]
        check("layer", torch.randn(40, 64))
    write(folder, [instance(RMS, 1500)])
    normforge.load_instances(folder)
    assert names() == ["rms_fwd_fp32_n1536"]
    check("rms", torch.randn(3, 1500))


@pytest.mark.parametrize("arguments", [(), (None,)])
def test_back_to_the_table_that_normforge_came_with(
    arguments: tuple[None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the variable names another folder, which any load goes before."""
    monkeypatch.setenv("NORMFORGE_INSTANCES", str(write(tmp_path / "mine", [instance(PLAIN, 64)])))
    assert names() == ["ln_fwd_fp32_n128"]
    normforge.load_instances(write(tmp_path / "called", [instance(RMS, 64)]))
    assert names() == ["rms_fwd_fp32_n128"]
    normforge.load_instances(*arguments)
    assert dispatch.find(PLAIN, 64).package == "normforge.generated"
    assert len(names()) > 100
    check("rms", torch.randn(3, 100))


X32, X16, XB = (torch.empty(2, 64, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
N = torch.ones(64)
INT8 = Mode(Norm.RMS, DType.BF16, DType.INT8, fquant=FusedQuant.DYNAMIC)
SEVERAL = [(mode, n) for mode in (RMS, Mode(Norm.LAYER, DType.FP16, DType.FP16), INT8, PLAIN) for n in (64, 200)]
# A filtered build holds the mode, but not every length.
FILTERED = [(PLAIN, n) for n in (64, 400, 1500)]
TABLES: dict[str, Any] = table_at(Path(__file__).with_name("load_instances.yaml"), {"FORMAT": FORMAT, **globals()})


def spoil(folder: Path, name: str, old: str, new: str | None) -> None:
    """Change one file of a folder, or remove the file or the folder."""
    path = folder / name
    if new is not None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@pytest.mark.parametrize("case", TABLES["spoilt"].values(), ids=[name.replace(" ", "_") for name in TABLES["spoilt"]])
def test_a_bad_folder_changes_nothing(case: list[Any], tmp_path: Path) -> None:
    *edit, message = case
    normforge.load_instances(write(tmp_path / "good", [instance(PLAIN, 64)]))
    before = normforge.instances()
    bad = write(tmp_path / "bad", [instance(RMS, 64)])
    spoil(bad, *edit)
    with pytest.raises(TableError) as raised:
        normforge.load_instances(bad)
    assert message in str(raised.value)
    assert str(bad) in str(raised.value)
    assert normforge.instances() == before
    check("layer", torch.randn(3, 64))


@pytest.mark.parametrize("new", [None, "def ln_fwd_fp32_one_pas("], ids=["no_module", "no_kernel"])
def test_a_listed_kernel_that_cannot_be_loaded(new: str | None, tmp_path: Path) -> None:
    folder = write(tmp_path / "bad", [instance(PLAIN, 64)])
    spoil(folder, "ln_fwd_fp32.py", "def ln_fwd_fp32_one_pass(", new)
    normforge.load_instances(folder)
    with pytest.raises(
        TableError, match="lists ln_fwd_fp32_n128, and its kernel ln_fwd_fp32_one_pass cannot be loaded"
    ):
        normforge.layernorm2d_fwd(torch.randn(3, 64))


LIST = "import normforge; print(*(entry.name for entry in normforge.instances()))"


def test_the_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where the process began."""
    write(tmp_path / "mine", [instance(RMS, 64), instance(PLAIN, 64)])
    monkeypatch.chdir(tmp_path)
    call = "import os; os.chdir('/'); import torch; print(normforge.layernorm2d_fwd(torch.arange(4.0)).y.tolist())"
    y, listed = printed(f"import normforge; {call}; {LIST}", NORMFORGE_INSTANCES="mine").splitlines()
    assert listed == "rms_fwd_fp32_n128 ln_fwd_fp32_n128"
    expected = torch.nn.functional.layer_norm(torch.arange(4.0), (4,))
    torch.testing.assert_close(torch.tensor([float(value) for value in y.strip("[]").split(",")]), expected)


def test_the_variable_names_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_INSTANCES", str(tmp_path / "nowhere"))
    with pytest.raises(TableError, match=f"{tmp_path / 'nowhere'} holds no generated kernels"):
        normforge.instances()


def miss(x: torch.Tensor, **keywords: Any) -> str:
    """The message of a call that the loaded table does not serve."""
    with pytest.raises(MissingInstanceError) as raised:
        normforge.which(x, **keywords)
    return str(raised.value)


def manifest_lines(message: str) -> str:
    """The lines that the message says to add: those indented, between its two sentences about them."""
    _, rest = message.split("add this group to the manifest:\n")
    lines, command = rest.split("and run: ")
    assert command == "python generate.py (or: normforge generate --manifest FILE --out DIR)"
    return lines


@pytest.mark.parametrize(
    ("x", "keywords", "name"), TABLES["misses"].values(), ids=[n.replace(" ", "_") for n in TABLES["misses"]]
)
def test_following_the_message_makes_what_was_missing(
    x: torch.Tensor, keywords: dict[str, Any], name: str, tmp_path: Path
) -> None:
    message = miss(x, **keywords)
    mode, n = name.rsplit("_", 1)[0], x.shape[-1]
    assert message.startswith(f"no instance of normforge's own generated/ folder serves {mode} with N = {n}")
    assert "NORMFORGE_ON_MISS=error forbids generating one" in message
    path = tmp_path / "instances.yaml"
    path.write_text("groups:\n" + manifest_lines(message))
    made = manifest.load(path).instances
    assert [instance.name for instance in made] == [name]
    normforge.load_instances(write(tmp_path / "mine", made))
    assert normforge.which(x, **keywords) == name


LINE = "The nearest instance it holds is {}; it differs in {}."


@pytest.mark.parametrize(("held", "x", "keywords", "name", "differs"), TABLES["nearest"])
def test_the_nearest_instance_and_what_differs(
    held: list[tuple[Mode, int]], x: torch.Tensor, keywords: dict[str, Any], name: str, differs: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "mine", [instance(*each) for each in held])
    normforge.load_instances(folder)
    message = miss(x, **keywords)
    assert message.startswith(f"no instance of {folder} serves ")
    assert [line for line in message.splitlines() if "The nearest" in line] == [LINE.format(name, differs)]


def test_a_table_that_holds_nothing_names_no_instance(tmp_path: Path) -> None:
    normforge.load_instances(write(tmp_path / "mine", []))
    assert "That table holds no instance at all." in miss(X32)


BUCKETS = "buckets:\n  n100: 1..100\n  nbig: 101..\n"
GROUP = "groups:\n  mine:\n    norm: layer\n    dtype_in: fp32\n"


def test_the_lines_name_the_buckets_of_the_loaded_table(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    path.write_text(BUCKETS + GROUP)
    normforge.load_instances(write(tmp_path / "mine", manifest.load(path).instances))
    for n, bucket in ((64, "n100"), (5000, "nbig")):
        x = torch.empty(2, n, dtype=torch.float16)
        path.write_text(BUCKETS + GROUP + manifest_lines(miss(x)))
        assert f"ln_fwd_fp16_{bucket}" in [instance.name for instance in manifest.load(path).instances]
