"""Which calls of engines' norms kernels served."""

from __future__ import annotations

import pytest

from normforge.integrations import serving, vllm

from ..counting import counted
from .engines import Left


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that served calls, in the order in which they ended."""
    names: list[str] = []
    for module, functions in (
        (serving, ("layernorm2d_fwd", "rmsnorm2d_fwd")),
        (vllm, ("quantised_layer_norm", "quantised_rms_norm")),
    ):
        for name in functions:
            monkeypatch.setattr(module, name, counted(names, name, getattr(module, name)))
    return names


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Left:
    """What holds calls whose kernel may not be compiled."""
    return Left(monkeypatch, caplog)
