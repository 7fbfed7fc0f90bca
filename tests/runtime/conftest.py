"""Keeps each test's table and cache its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from normforge.selection import dispatch


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("NORMFORGE_INSTANCES", "NORMFORGE_ON_MISS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def fresh_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher of a process that has loaded and generated nothing; afterwards everything is as it was."""
    monkeypatch.setattr(dispatch, "_loaded", None)
    monkeypatch.setattr(dispatch, "_generated", {})
    monkeypatch.setattr(dispatch, "plans", {})


@pytest.fixture
def empty_cache(fresh_table: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that nothing has been generated into, in use."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("NORMFORGE_CACHE", str(cache))
    return cache
