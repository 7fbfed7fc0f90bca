"""torch.compile of the same expressions, compiled anew for each shape, as its default and as its longest search."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config

from .. import fp8_inputs, gates, groups, modulations, quantisations
from ..cells import Norm, Task
from ..expressions import Transform, torch_builders
from ..provider import Builder, Provider


def _reset() -> None:
    # Otherwise torch falls back to eager after eight shapes.
    torch._dynamo.reset()
    # A graph that is kept for another backward pass may not give its saved tensors away.
    torch._functorch.config.donated_buffer = False


def _compile(mode: str) -> Transform:
    @functools.cache
    def transform(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, mode=mode, dynamic=False)

    return transform


def _builders(mode: str) -> dict[tuple[Task, Norm], Builder]:
    transform = _compile(mode)
    made = (family.torchs(transform) for family in (fp8_inputs, groups, gates, modulations, quantisations))
    return functools.reduce(operator.or_, made, torch_builders(transform))


PROVIDERS = tuple(
    Provider(name, label, ("torch._inductor",), _builders(mode), reset=_reset)
    for name, label, mode in (
        ("compile", "torch.compile", "default"),
        ("max-autotune", "torch.compile max-autotune", "max-autotune-no-cudagraphs"),
    )
)
