"""What calls launch, by their keys, and that nothing is known from another test."""

from __future__ import annotations

import pytest

from normforge.calls import plan
from normforge.kernels.gpu import KernelKey

from ..launching import noting


@pytest.fixture(autouse=True)
def _nothing_known(nothing_known: None) -> None:
    """No test here knows a call of an earlier test."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[KernelKey]:
    """The keys of the kernels that calls launch."""
    met: set[KernelKey] = set()
    monkeypatch.setattr(plan, "Launcher", noting(met))
    return met
