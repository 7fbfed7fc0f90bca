"""PyTorch's own operators, eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import gates, groups, modulations
from ..expressions import torch_builders
from ..provider import Provider


def _eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


_BUILDERS = torch_builders(_eagerly) | groups.torchs(_eagerly) | gates.torchs(_eagerly) | modulations.torchs(_eagerly)

PROVIDERS = (Provider("eager", "torch", ("torch",), _BUILDERS, compiles=False),)
