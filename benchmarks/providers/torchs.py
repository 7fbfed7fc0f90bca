"""PyTorch's own operators, eagerly and compiled anew for each shape, and its copy of x, the ceiling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config

from ..cells import Norm, Task
from ..expressions import Transform, torch_builders
from ..inputs import Inputs
from ..provider import RECORDED, Prepared, Provider


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


def _copy(inputs: Inputs) -> Prepared:
    target = torch.empty_like(inputs.x)
    return Prepared(lambda: target.copy_(inputs.x), lambda _: {})


PROVIDERS = (
    Provider("eager", "torch", ("torch",), torch_builders(lambda function: function), compiles=False),
    *(
        Provider(name, label, ("torch._inductor",), torch_builders(_compile(mode)), reset=_reset)
        for name, label, mode in (
            ("compile", "torch.compile", "default"),
            ("max-autotune", "torch.compile max-autotune", "max-autotune-no-cudagraphs"),
        )
    ),
    Provider(
        "copy",
        "copy of x",
        ("torch",),
        dict.fromkeys(product(set(Task) - set(RECORDED), Norm), _copy),
        compiles=False,
    ),
)
