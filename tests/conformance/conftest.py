"""Keeps settings from outside away, and gives back to the card what a large case took of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

_KEPT_BYTES = 1 << 30


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("NORMFORGE_INSTANCES", "NORMFORGE_ON_MISS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(autouse=True)
def _released_gpu_memory() -> Iterator[None]:
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > _KEPT_BYTES:
        torch.cuda.empty_cache()
