"""Keeps workers that share a card from holding on to each other's memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

_KEPT_BYTES = 1 << 30


@pytest.fixture(autouse=True)
def released_gpu_memory() -> Iterator[None]:
    """Give what a large test took back to the card."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > _KEPT_BYTES:
        torch.cuda.empty_cache()
