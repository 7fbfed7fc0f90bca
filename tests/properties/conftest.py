"""Kernels of the kinds that a run on a GPU draws from, compiled many at once."""

from __future__ import annotations

import os

import pytest
import torch

from .profile import compile_ahead, pool


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available():
        compile_ahead(pool(), torch.device("cuda"))
