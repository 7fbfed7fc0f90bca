"""Counts the calls that are checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from normforge.calls import road


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """What is added to at each call that is checked."""
    found: list[None] = []
    check: Callable[..., object] = vars(road)["check"]

    def counted(*arguments: object) -> object:
        found.append(None)
        return check(*arguments)

    monkeypatch.setattr(road, "check", counted)
    return found
