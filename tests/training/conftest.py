"""Makes each test of this folder run on one core, with no settings from outside."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Tensors here are small: a second thread only waits, and takes a core from the other workers while it does.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("NORMFORGE_INSTANCES", "NORMFORGE_ON_MISS"):
        monkeypatch.delenv(variable, raising=False)
