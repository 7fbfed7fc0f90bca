"""What engines register plugs with, in as much as a plug can tell: names, signatures, checks and order of calls."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


def install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Have modules of these names and contents be imported, and the packages above them, until a test is over."""
    names = {".".join(name.split(".")[: depth + 1]) for name in modules for depth in range(name.count(".") + 1)}
    for name in sorted(names):
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
        above, _, own = name.rpartition(".")
        if above:
            setattr(sys.modules[above], own, module)
