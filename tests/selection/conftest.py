"""What tests of tables share."""

from __future__ import annotations

import pytest


@pytest.fixture
def strict(fresh_table: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh table beside which nothing is generated: what a table does not hold is missing."""
    monkeypatch.setenv("NORMFORGE_ON_MISS", "error")
