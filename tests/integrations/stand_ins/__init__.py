"""What engines register plugs with, in as much as a plug can tell: names, signatures, checks and order of calls."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist


class Group:
    """The tensor-parallel group: all processes that there are."""

    def __init__(self) -> None:
        self.device_group = dist.group.WORLD
        self.world_size = dist.get_world_size()


def all_reduced(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the tensor-parallel ranks."""
    total = x.clone()
    dist.all_reduce(total)
    return total


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
