"""PyTorch's own operators, eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..expressions import torch_builders
from ..groups import torchs
from ..provider import Provider


def _eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


PROVIDERS = (Provider("eager", "torch", ("torch",), torch_builders(_eagerly) | torchs(_eagerly), compiles=False),)
