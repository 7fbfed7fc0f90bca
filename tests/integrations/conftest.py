"""Which calls of engines' norms kernels served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from normforge.calls import attempt
from normforge.errors import FrozenError
from normforge.integrations import serving, vllm

from ..counting import counted
from .engines import Leaves, alike


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
def leaves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Leaves:
    """Return what holds calls whose kernel may not be compiled to the engine's own results."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise FrozenError("it would have to be compiled")

    def hold(module: Any, name: str, call: Callable[[], tuple[Any, Any]], what: str) -> None:
        monkeypatch.setattr(module, name, refuse)
        monkeypatch.setattr(attempt, "_said", set())
        for _ in range(2):
            alike(*call(), bits=1.0)
        says = [record.getMessage() for record in caplog.records if record.name == "normforge"]
        assert says == [f"normforge leaves {what}: it would have to be compiled"]

    return hold
