"""What calls launch, by their keys, and that nothing is known from another test."""

from __future__ import annotations

from typing import Any

import pytest

from normforge.calls import plan
from normforge.kernels.key import KernelKey
from normforge.kernels.launcher import Launcher


@pytest.fixture(autouse=True)
def _nothing_known(nothing_known: None) -> None:
    """No test here knows a call of an earlier test."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[KernelKey]:
    """The keys of the kernels that calls launch; stand-ins for calls have no device."""
    met: set[KernelKey] = set()

    class Noting(Launcher):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            if given[-1] is not None:
                met.add(self.key)

    monkeypatch.setattr(plan, "Launcher", Noting)
    return met
