"""Which calls of engines' norms kernels served."""

from __future__ import annotations

import pytest

from normforge.integrations import serving
from normforge.integrations import vllm as plug_of_vllm

from ..counting import counted


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that served calls, in the order in which they ended."""
    names: list[str] = []
    for module in (serving, plug_of_vllm):
        for name in ("layernorm2d_fwd", "rmsnorm2d_fwd"):
            monkeypatch.setattr(module, name, counted(names, name, getattr(module, name)))
    return names
