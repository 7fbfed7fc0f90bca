"""Fixtures of tests of calls: what is checked is counted, and nothing is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from normforge.calls import road
from normforge.selection import dispatch


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


@pytest.fixture
def nothing_known() -> Iterator[None]:
    """No call of an earlier test is known, and none is left known for a later one."""
    dispatch.forget()
    yield
    dispatch.forget()
