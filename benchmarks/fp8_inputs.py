"""How torch and this project compute cells of fp8 inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .cells import DTYPES, Norm, Task
from .expressions import normalise
from .fp8_cells import Fp8Cell
from .inputs import Inputs
from .provider import Builder, Prepared, named

# A provider's function for a cell: of x, its scale, weight and, for LayerNorm, bias.
Function = Callable[..., torch.Tensor]


def builders(function: Callable[[Fp8Cell, float], Function]) -> dict[tuple[Task, Norm], Builder]:
    """Builders of both norms, given what makes a function of a cell."""

    def forward(inputs: Inputs) -> Prepared:
        assert isinstance(inputs.cell, Fp8Cell)
        run = function(inputs.cell, inputs.eps)
        operands = (inputs.x, inputs.x_scale, inputs.weight, inputs.bias)
        return Prepared(lambda: run(*operands), named("y"))

    return {(Task.SCALED, norm): forward for norm in Norm}


def torchs(transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> dict[tuple[Task, Norm], Builder]:
    """Torch's operators, `transform`ed: in fp32, and rounded once."""

    def function(cell: Fp8Cell, eps: float) -> Function:
        run = transform(_composed)
        return lambda x, x_scale, weight, bias: run(x, x_scale, weight, bias, eps, DTYPES[cell.out_dtype])

    return builders(function)


def _composed(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    wide = None if bias is None else bias.float()
    return normalise(x.float() * x_scale, weight.float(), wide, eps).to(out_dtype)
