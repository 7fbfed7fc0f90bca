"""GroupNorm's oracle, and how torch, apex and this project compute its cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .cells import Cell, Norm, Task
from .group_cells import GroupCell
from .inputs import Inputs
from .provider import Builder, Prepared, load, named

EPS = 1e-5


def expect(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Every output of a cell, by torch's operators in fp64, a sample at a time."""
    x, weight, bias = (tensor.double().requires_grad_() for tensor in _operands(inputs))
    found: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for sample in range(x.shape[0]):
        one = x[sample : sample + 1].detach().requires_grad_()
        y = _normalise(one, weight, bias, inputs.cell)
        if inputs.dy is None:
            found.append(y.detach().float())
            continue
        dx, *others = torch.autograd.grad(y, (one, weight, bias), inputs.dy[sample : sample + 1].double())
        found.append(dx.float())
        sums = others if not sums else [total + other for total, other in zip(sums, others, strict=True)]
    whole = torch.cat(found)
    if inputs.dy is None:
        return {"y": whole}
    return {"dx": whole, "dweight": sums[0].float(), "dbias": sums[1].float()}


def _operands(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert inputs.bias is not None
    return inputs.x, inputs.weight, inputs.bias


def _normalise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, cell: Cell) -> torch.Tensor:
    assert isinstance(cell, GroupCell)
    y = F.group_norm(x, cell.groups, weight, bias, EPS)
    return F.silu(y) if cell.silu else y


Function = Callable[..., torch.Tensor]

# Torch rounds the norm before SiLU, and its gradient: dx was up to 1.7 tolerances off on an H200.
_EXPRESSION_ALLOWANCE = 2.0


def builders(function: Callable[[GroupCell], Function], allowance: float = 1.0) -> dict[tuple[Task, Norm], Builder]:
    """Builders of both tasks, given what makes a function of x, weight and bias for a cell, and how far it may be off.

    Of the backward pass only autograd's engine is timed, on a graph that was recorded before and is kept.
    """

    def forward(inputs: Inputs) -> Prepared:
        run, operands = function(_cell(inputs)), _operands(inputs)
        return Prepared(lambda: run(*operands), named("y"), allowance)

    def backward(inputs: Inputs) -> Prepared:
        leaves = inputs.leaves()
        y = function(_cell(inputs))(*leaves)
        names = named("dx", "dweight", "dbias")
        return Prepared(lambda: torch.autograd.grad(y, leaves, inputs.dy, retain_graph=True), names, allowance)

    return {(Task.GROUP, Norm.LAYER): forward, (Task.GROUP_BACKWARD, Norm.LAYER): backward}


def _cell(inputs: Inputs) -> GroupCell:
    assert isinstance(inputs.cell, GroupCell)
    return inputs.cell


def torchs(transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> dict[tuple[Task, Norm], Builder]:
    """Torch's operators, `transform`ed."""

    def function(cell: GroupCell) -> Function:
        run = transform(_normalise)
        return lambda x, weight, bias: run(x, weight, bias, cell)

    return builders(function, _EXPRESSION_ALLOWANCE)


def apexs(module: str) -> dict[tuple[Task, Norm], Builder]:
    """Apex's GroupNorm, of channels that are innermost."""

    def function(cell: GroupCell) -> Function:
        made: Any = load(module).GroupNorm(cell.groups, cell.shape[1], eps=EPS, act="silu" if cell.silu else "")

        def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            given = {"weight": weight, "bias": bias}
            y: torch.Tensor = torch.func.functional_call(made.to(x.device, x.dtype), given, (x,))
            return y

        return run

    return builders(function)
