"""The oracle of gated norms, and how torch, this project and peers compute their cells."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from .cells import Norm, Task
from .gated_cells import GatedCell
from .inputs import Inputs, chunks
from .provider import Builder, Prepared, named

# A provider's function for a cell: of x, gate, weight and, for LayerNorm, bias.
Function = Callable[..., torch.Tensor]


def expect(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Every output of a cell, by torch's operators in fp64, some rows at a time."""
    run = composed(_cell(inputs), inputs.eps)
    vectors = [vector.double().requires_grad_() for vector in (inputs.weight, inputs.bias) if vector is not None]
    rows: list[list[torch.Tensor]] = []
    sums = [torch.zeros_like(vector) for vector in vectors]
    assert inputs.gate is not None
    for some in chunks(inputs.x):
        leaves = [tensor[some].double().requires_grad_() for tensor in (inputs.x, inputs.gate)]
        y = run(*leaves, *vectors)
        if inputs.dy is None:
            rows.append([y.detach().float()])
            continue
        found = torch.autograd.grad(y, (*leaves, *vectors), inputs.dy[some].double())
        rows.append([gradient.float() for gradient in found[:2]])
        sums = [total + gradient for total, gradient in zip(sums, found[2:], strict=True)]
    names = ("y",) if inputs.dy is None else ("dx", "dgate")
    wanted = dict(zip(names, map(torch.cat, zip(*rows, strict=True)), strict=True))
    if inputs.dy is not None:
        wanted |= dict(zip(("dweight", "dbias"), [total.float() for total in sums], strict=False))
    return wanted


def composed(cell: GatedCell, eps: float) -> Function:
    """Compute the norm with torch's operators, in fp32 (or fp64) and rounded once, as models without a kernel do."""

    def run(
        x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        factor, s = F.silu(gate.to(wide)), x.to(wide)
        s = s * factor if cell.gate_first else s
        rows = s.view(*s.shape[:-1], -1, cell.columns or cell.n)
        if cell.norm is Norm.LAYER:
            rows = rows - rows.mean(-1, keepdim=True)
        y = (rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()).view(s.shape) * weight
        y = y if bias is None else y + bias
        return (y if cell.gate_first else y * factor).to(x.dtype)

    return run


def builders(
    function: Callable[[GatedCell, float], Function], norms: tuple[Norm, ...] = tuple(Norm)
) -> dict[tuple[Task, Norm], Builder]:
    """Builders of both tasks, given what makes a function of a cell.

    Of the backward pass only autograd's engine is timed, on a graph that was recorded before and is kept.
    """

    def forward(inputs: Inputs) -> Prepared:
        run, operands = function(_cell(inputs), inputs.eps), inputs.operands()
        return Prepared(lambda: run(*operands), named("y"))

    def backward(inputs: Inputs) -> Prepared:
        leaves = inputs.leaves()
        y = function(_cell(inputs), inputs.eps)(*leaves)
        names = named("dx", "dgate", "dweight", "dbias")
        return Prepared(lambda: torch.autograd.grad(y, leaves, inputs.dy, retain_graph=True), names)

    made = {Task.GATED: forward, Task.GATED_BACKWARD: backward}
    return {(task, norm): builder for (task, builder), norm in product(made.items(), norms)}


def torchs(transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> dict[tuple[Task, Norm], Builder]:
    """Torch's operators, `transform`ed."""
    return builders(lambda cell, eps: transform(composed(cell, eps)))


def _cell(inputs: Inputs) -> GatedCell:
    assert isinstance(inputs.cell, GatedCell)
    return inputs.cell
