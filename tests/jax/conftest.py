"""Settles JAX before the first test of this folder."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def _settled(request: pytest.FixtureRequest) -> None:
    if find_spec("jax") is not None:
        from .settled import settle

        marked = request.config.option.markexpr
        settle(on_gpu="gpu" in marked and "not gpu" not in marked)
