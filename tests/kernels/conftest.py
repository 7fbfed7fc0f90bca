"""A folder for kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from normforge.codegen import emit


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
