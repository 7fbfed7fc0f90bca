"""Fixtures of tests of calls: what is checked is listed, and nothing is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import normforge
from normforge.calls import check, first, road, row_gradients
from normforge.families.group import row as group
from normforge.selection import dispatch

from ..calling import DEVICES, counted


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of x in the calls that are checked, rather than known."""
    shapes: list[tuple[int, ...]] = []
    usual = check.check

    def noted(function: str, given: Any, **keywords: Any) -> Any:
        shapes.append(tuple(given["x"].shape))
        return usual(function, given, **keywords)

    # Of the 2d functions, and of all others.
    for module in (first, road):
        monkeypatch.setattr(module, "check", noted)
    return shapes


@pytest.fixture
def looked(nothing_known: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for each call that is checked, each backward pass that is planned, and each kernel that is chosen."""
    return counted(
        monkeypatch,
        (first, "check", "call"),
        (road, "check", "call"),
        (row_gradients.Backward, "gradients", "gradients"),
        (group, "launched_backward", "gradients"),
        (dispatch, "find", "kernel"),
    )


@pytest.fixture
def invariant() -> Iterator[None]:
    """A test runs under batch invariance."""
    with normforge.batch_invariant():
        yield


@pytest.fixture(params=DEVICES)
def on_each_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every tensor of a test is made on a device."""
    with torch.device(request.param):
        yield
