"""`examples/train_tiny_gpt.py`: its two runs, what it draws, and its exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .test_examples import example as example_of
from .thorough import THOROUGH

TINY = ("--device", "cpu", "--batch", "2", "--context", "16", "--width", "32", "--layers", "2", "--heads", "2")
ROW = re.compile(r"^ +(\d+|held out) +(\d+\.\d+) +(\d+\.\d+) +\S+$", re.MULTILINE)


@pytest.fixture
def script(repository: Path) -> Path:
    return repository / "examples" / "train_tiny_gpt.py"


@pytest.fixture
def example(repository: Path) -> Any:
    """The script as a module."""
    return example_of(repository, "train_tiny_gpt")


def run(script: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a process of its own, whose environment does not turn Triton's interpreter on."""
    return subprocess.run(
        [sys.executable, str(script), *argv],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@THOROUGH
def test_without_a_gpu_both_curves_are_equal_and_drawn(script: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    done = run(script, *TINY, "--steps", "10", "--tolerance", "0", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert "normforge calls torch's own operator" in done.stdout
    rows = ROW.findall(done.stdout)
    assert [row[0] for row in rows] == [*map(str, range(1, 11)), "held out"]
    assert all(one == other for _, one, other in rows)
    assert float(rows[9][1]) < float(rows[0][1])
    assert picture.read_bytes().startswith(b"\x89PNG")


@THOROUGH
@pytest.mark.parametrize(
    "flags",
    [("--norm", "layer"), ("--norm", "rms", "--dtype", "bf16", "--fused-add")],
    ids=["layer", "rms-bf16-fused"],
)
def test_generated_kernels_train_alike(
    example: Any, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    # In this process, whose interpreter takes a third of the time.
    assert example.main([*TINY, "--layers", "1", "--steps", "4", "--tolerance", "1e-3", *flags]) == 0
    printed = capsys.readouterr().out
    assert "normforge's kernels run in Triton's interpreter" in printed
    assert len(ROW.findall(printed)) == 5


def test_a_wrong_norm_is_found_out(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-2

    monkeypatch.setattr(example.normforge, "patch", spoil)
    assert example.main([*TINY, "--steps", "10", "--tolerance", "1e-3"]) == 1
    assert "the curves DO NOT AGREE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps is at least 1, not 0"),
        (["--heads", "3"], "--heads must divide --width, and 3 does not divide 32"),
        (["--norm", "batch"], "invalid choice: 'batch'"),
        (["--plot", "no/such/folder.png"], "--plot: there is no folder no/such"),
        (["--context", "999999"], "--context is at most 8192, not 999999"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[0][2:] + value[1][-3:],
)
def test_bad_flags_are_refused(
    example: Any, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        example.main([*TINY, *flags])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_picture_needs_matplotlib(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stop:
        example.main([*TINY, "--plot", "curves.png"])
    assert stop.value.code == 2
    assert "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err
