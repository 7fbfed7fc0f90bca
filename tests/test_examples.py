"""The examples that a user copies: each runs on a CPU, and is short."""

from __future__ import annotations

import importlib.util
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
