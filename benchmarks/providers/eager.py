"""PyTorch's own operators, eagerly."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from .. import fp8_inputs, gates, groups, modulations, quantisations
from ..expressions import torch_builders
from ..provider import Provider


def _eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


_FAMILIES = (fp8_inputs, groups, gates, modulations, quantisations)
_BUILDERS = functools.reduce(operator.or_, (family.torchs(_eagerly) for family in _FAMILIES), torch_builders(_eagerly))

PROVIDERS = (Provider("eager", "torch", ("torch",), _BUILDERS, compiles=False),)
