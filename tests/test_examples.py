"""The examples that a user copies: each runs on a CPU, and is short."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge

from .calling import module_at, printed
from .thorough import THOROUGH

TINY = ("--device", "cpu", "--batch", "2", "--context", "16", "--width", "32", "--layers", "2", "--heads", "2")
ROW = re.compile(r"^ +(\d+|held out) +(\d+\.\d+) +(\d+\.\d+) +\S+$", re.MULTILINE)

NAMES = ("fp8_block", "frozen_server", "group_norm_unet", "hugging_face")


def example(repository: Path, name: str) -> Any:
    return module_at(repository / "examples" / f"{name}.py", name)


def test_an_example_has_80_lines_at_most(repository: Path) -> None:
    lines = {name: len((repository / "examples" / f"{name}.py").read_text().splitlines()) for name in NAMES}
    assert max(lines.values()) <= 80, lines


def test_the_fp8_block_learns_as_it_does_in_bf16(repository: Path) -> None:
    """e4m3 rounds by a sixteenth at most, and errors of a sum of 256 products mostly cancel."""
    block = example(repository, "fp8_block")
    # As a product takes them.
    assert block.quantise(torch.ones(128, 256).t())[0].is_contiguous()
    fp8, bf16 = block.main()
    assert fp8 != bf16
    assert fp8 == pytest.approx(bf16, rel=2**-5)
    assert fp8 == sorted(fp8, reverse=True)
    assert fp8[-1] < fp8[0] / 2


def test_the_patched_unet_computes_the_same(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example(repository, "group_norm_unet").main() < 1e-4
    assert "gn_fwd_fp32" in capsys.readouterr().out


@pytest.mark.usefixtures("fresh_table")
def test_the_frozen_server_has_what_the_filter_left(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = example(repository, "frozen_server").main()
    assert names
    assert all(name.startswith("rms_fwd_bf16") for name in names)
    assert "refused: " in capsys.readouterr().out
    # Afterwards everything is as it was.
    assert normforge.which(torch.empty(2, 64)) in {entry.name for entry in normforge.instances()}


def test_the_notebook_is_that_of_the_scripts(repository: Path) -> None:
    notebook = example(repository, "notebook")
    assert sorted(notebook.NAMES) == sorted(NAMES)
    assert notebook.main(["--check"]) == 0
    read = json.loads((repository / "examples" / "examples.ipynb").read_text())
    assert (read["nbformat"], read["nbformat_minor"]) == (4, 4)
    for cell in read["cells"]:
        is_code = cell["cell_type"] == "code"
        assert cell.keys() == {"cell_type", "metadata", "source", *(("execution_count", "outputs") if is_code else ())}
        # No cell begins or ends within a statement.
        assert not is_code or ast.parse("".join(cell["source"]))


@THOROUGH
def test_without_a_gpu_both_curves_are_equal_and_drawn(repository: Path, tmp_path: Path) -> None:
    """In a process whose environment does not turn Triton's interpreter on."""
    picture, script = tmp_path / "curves.png", repository / "examples" / "train_tiny_gpt.py"
    options = [*TINY, "--steps", "10", "--tolerance", "0", "--plot", str(picture)]
    code = f"import runpy, sys; sys.argv[1:] = {options!r}; runpy.run_path({str(script)!r}, run_name='__main__')"
    said = printed(code, TRITON_INTERPRET=None, OMP_NUM_THREADS="1")
    assert "normforge calls torch's own operator" in said
    rows = ROW.findall(said)
    assert [row[0] for row in rows] == [*map(str, range(1, 11)), "held out"]
    assert all(one == other for _, one, other in rows)
    assert float(rows[9][1]) < float(rows[0][1])
    assert picture.read_bytes().startswith(b"\x89PNG")


@THOROUGH
@pytest.mark.parametrize(
    "flags", [("--norm", "layer"), ("--norm", "rms", "--dtype", "bf16", "--fused-add")], ids=["layer", "rms-bf16-fused"]
)
def test_generated_kernels_train_alike(
    flags: tuple[str, ...], repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # In this process, whose interpreter takes a third of the time.
    script = example(repository, "train_tiny_gpt")
    assert script.main([*TINY, "--layers", "1", "--steps", "4", "--tolerance", "1e-3", *flags]) == 0
    said = capsys.readouterr().out
    assert "normforge's kernels run in Triton's interpreter" in said
    assert len(ROW.findall(said)) == 5


def test_a_wrong_norm_is_found_out(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-2

    script = example(repository, "train_tiny_gpt")
    monkeypatch.setattr(script.normforge, "patch", spoil)
    assert script.main([*TINY, "--steps", "10", "--tolerance", "1e-3"]) == 1
    assert "the curves DO NOT AGREE" in capsys.readouterr().out
