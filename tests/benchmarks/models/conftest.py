"""The model that the tests of the benchmark of models share."""

from __future__ import annotations

import pytest

from benchmarks.models import worker
from benchmarks.models.specs import SPECS, Spec

from .toy import TOY


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Spec:
    """A model of one norm, which the interpreter computes at once, and nothing that is worth collecting."""
    monkeypatch.setattr(worker, "release", lambda device: None)
    monkeypatch.setitem(SPECS, TOY.name, TOY)
    return TOY
