"""The examples that a user copies: each runs on a CPU, and is short."""

from __future__ import annotations

import importlib.util
import json
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge

NAMES = ("fp8_block", "frozen_server", "group_norm_unet", "hugging_face")


def example(repository: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, repository / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks itself up there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_80_lines_at_most(name: str, repository: Path) -> None:
    assert len((repository / "examples" / f"{name}.py").read_text().splitlines()) <= 80


def test_the_fp8_block_is_as_exact_as_fp8(repository: Path) -> None:
    """e4m3 rounds by a sixteenth at most, and errors of a sum of 256 products mostly cancel."""
    assert 0.0 < example(repository, "fp8_block").main() < 2**-4


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


def run_cells(repository: Path, name: str, **constants: Any) -> Any:
    """Run the notebook's cells of one example as IPython does, and return the value of the last.

    Args:
        repository: the clone.
        name: the example.
        constants: values that replace constants of the example before its `main` is called.
    """
    cells = json.loads((repository / "examples" / "examples.ipynb").read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    start = next(at for at, text in enumerate(texts) if text.startswith(f"## {name}\n"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for at in range(start + 1, len(cells)):
        if cells[at]["cell_type"] != "code":
            break
        text, file = texts[at], f"<cell {at}>"
        # `patch` reads the text of a forward.
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        if text == "main()":
            namespace.update(constants)
            return eval(text, namespace)
        exec(compile(text, file, "exec"), namespace)
    raise AssertionError(f"{name} calls no main")


def test_the_notebook_is_that_of_the_scripts(repository: Path) -> None:
    notebook = example(repository, "notebook")
    assert sorted(notebook.NAMES) == sorted(NAMES)
    assert notebook.main(["--check"]) == 0
    read = json.loads((repository / "examples" / "examples.ipynb").read_text())
    assert (read["nbformat"], read["nbformat_minor"]) == (4, 4)
    for cell in read["cells"]:
        outputs = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"cell_type", "metadata", "source", *outputs}


def test_a_notebook_that_scripts_have_left_behind_is_found_out(repository: Path, tmp_path: Path) -> None:
    notebook = example(repository, "notebook")
    notebook.NOTEBOOK = tmp_path / "examples.ipynb"
    assert notebook.main(["--check"]) == 1
    assert notebook.main([]) == 0
    assert notebook.main(["--check"]) == 0
    notebook.NOTEBOOK.write_text(notebook.NOTEBOOK.read_text().replace("torch.randn", "torch.rand"))
    assert notebook.main(["--check"]) == 1


@pytest.mark.usefixtures("fresh_table")
def test_the_notebooks_cells_run(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0.0 < run_cells(repository, "fp8_block") < 2**-4
    assert run_cells(repository, "group_norm_unet") < 1e-4
    assert all(name.startswith("rms_fwd_bf16") for name in run_cells(repository, "frozen_server"))
    assert "gn_fwd_fp32" in capsys.readouterr().out
