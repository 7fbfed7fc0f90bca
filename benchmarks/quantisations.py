"""How torch and this project compute norms that are quantised as engines have it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from .cells import Norm, Task
from .inputs import Inputs
from .provider import Builder, Prepared
from .quantised_cells import QuantisedCell

# A provider's function for a cell: of x, weight, bias, residual and a given scale, to outputs by name.
Function = Callable[..., dict[str, torch.Tensor]]

_QMAX = 448.0
# Engines replace the scale of zeros with this.
_LEAST_SCALE = 1e-10
# A byte of a packed scale is an exponent of fp32 as fp32 has it; the mantissa has so many bits.
_MANTISSA = 23


def composed(cell: QuantisedCell, eps: float) -> Function:
    """Compute a cell with torch's operators, in the order and with the roundings of vLLM's native operators.

    The residual is added in fp32, and the norm is of the sum as it is stored. y is rounded to x's type before it is
    quantised; RMSNorm also before its weight.
    """

    def run(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        given: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = {}
        s = x.float()
        if residual is not None:
            outputs["residual_out"] = (s + residual.float()).to(x.dtype)
            s = outputs["residual_out"].float()
        if bias is None:
            y = (s * (s.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight
        else:
            y = F.layer_norm(s, (cell.n,), weight.float(), bias.float(), eps).to(x.dtype)
        if cell.unquantised:
            outputs["unquantised"] = y
        return outputs | _quantised(cell, y, given)

    return run


def _quantised(cell: QuantisedCell, y: torch.Tensor, given: torch.Tensor | None) -> dict[str, torch.Tensor]:
    dtype = torch.float8_e4m3fn
    if given is not None:
        return {"y": (y * given.reciprocal()).clamp(-_QMAX, _QMAX).to(dtype)}
    groups = y.view(-1, cell.n // cell.group_columns, cell.group_columns)
    scales = groups.abs().amax(-1, keepdim=True).float() / _QMAX
    if cell.packed:
        scales = scales.log2().ceil().exp2()
    scales = scales.clamp(min=_LEAST_SCALE)
    quantised = (groups / scales).clamp(-_QMAX, _QMAX).to(dtype).view(y.shape)
    scales = scales.squeeze(-1)
    if cell.packed:
        exponents = (scales.view(torch.int32) >> _MANTISSA).view(len(y), -1, 4)
        shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=y.device)
        scales = (exponents << shifts).sum(-1, dtype=torch.int32)
    if cell.column_major:
        scales = scales.t().contiguous().t()
    return {"y": quantised, "y_scale": scales}


def builders(function: Callable[[QuantisedCell, float], Function]) -> dict[tuple[Task, Norm], Builder]:
    """Builders of both tasks, given what makes a function of a cell."""

    def build(inputs: Inputs) -> Prepared:
        assert isinstance(inputs.cell, QuantisedCell)
        run = function(inputs.cell, inputs.eps)
        operands: tuple[Any, ...] = (inputs.x, inputs.weight, inputs.bias, inputs.residual, inputs.y_scale)
        return Prepared(lambda: run(*operands), lambda returned: returned)

    return dict.fromkeys(product((Task.QUANTISED, Task.ADD_QUANTISED), Norm), build)


def torchs(transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> dict[tuple[Task, Norm], Builder]:
    """Torch's operators, `transform`ed."""
    return builders(lambda cell, eps: transform(composed(cell, eps)))
