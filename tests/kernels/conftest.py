"""A folder for kernels, and what keeps workers that share a card from holding on to each other's memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from normforge.codegen import emit

_KEPT_BYTES = 1 << 30


@pytest.fixture(autouse=True)
def released_gpu_memory() -> Iterator[None]:
    """Give what a large test took back to the card."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > _KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An importable folder that modules are generated into as they are needed."""
    folder = tmp_path_factory.mktemp("rendered") / "rendered_kernels"
    folder.mkdir()
    for name, text in emit.shared_files(backward=True).items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder.parent))
    yield folder
    sys.path.remove(str(folder.parent))
