"""Which calls of engines' norms kernels served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from normforge.integrations import serving
from normforge.integrations import vllm as plug_of_vllm


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that served calls, in the order in which they ended."""
    names: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            names.append(name)
            return result

        return count

    for module in (serving, plug_of_vllm):
        for name in ("layernorm2d_fwd", "rmsnorm2d_fwd"):
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return names
