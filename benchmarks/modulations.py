"""The oracle of modulated norms, and how torch and this project compute their cells."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from .cells import Norm, Task
from .inputs import Inputs
from .modulated_cells import ModulatedCell
from .provider import Builder, Prepared, named

# A provider's function for a cell: of x, scale, shift and, of a gated one, gate and residual, to y and, of a
# gated one, the sum.
Function = Callable[..., Any]


def expect(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Every output of a cell, by torch's operators in fp64, a sample at a time."""
    run = composed(_cell(inputs), inputs.eps)
    found: list[dict[str, torch.Tensor]] = []
    for sample in range(inputs.x.shape[0]):
        leaves = [operand[sample : sample + 1].double().requires_grad_() for operand in _operands(inputs)]
        outputs = _outputs(run(*leaves))
        if inputs.dy is None:
            found.append(dict(zip(_VALUES, outputs, strict=False)))
            continue
        given = [gradient[sample : sample + 1].double() for gradient in _given(inputs)]
        found.append(dict(zip(_GRADIENTS, torch.autograd.grad(outputs, leaves, given), strict=False)))
    return {name: torch.cat([one[name].detach().float() for one in found]) for name in found[0]}


def composed(cell: ModulatedCell, eps: float) -> Function:
    """Compute the norm with torch's operators, as DiT does: sum and modulation in the dtypes of the operands."""

    def run(
        x: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        gate: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> Any:
        if gate is not None and residual is not None:
            x = residual + x * gate.unsqueeze(1)
        norm = F.layer_norm if cell.norm is Norm.LAYER else F.rms_norm
        y = norm(x, (cell.n,), eps=eps) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        return y if gate is None else (y, x)

    return run


def builders(
    function: Callable[[ModulatedCell, float], Function], allowance: float = 1.0
) -> dict[tuple[Task, Norm], Builder]:
    """Builders of both tasks, given what makes a function of a cell, and how far that may be off.

    Of the backward pass only autograd's engine is timed, on a graph that was recorded before and is kept.
    """

    def forward(inputs: Inputs) -> Prepared:
        run, operands = function(_cell(inputs), inputs.eps), _operands(inputs)
        return Prepared(lambda: run(*operands), named(*_VALUES), allowance)

    def backward(inputs: Inputs) -> Prepared:
        leaves = [operand.detach().requires_grad_() for operand in _operands(inputs)]
        outputs = _outputs(function(_cell(inputs), inputs.eps)(*leaves))
        given = _given(inputs)
        return Prepared(
            lambda: torch.autograd.grad(outputs, leaves, given, retain_graph=True), named(*_GRADIENTS), allowance
        )

    made = {Task.MODULATED: forward, Task.MODULATED_BACKWARD: backward}
    return {(task, norm): builder for (task, builder), norm in product(made.items(), Norm)}


def torchs(transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> dict[tuple[Task, Norm], Builder]:
    """Torch's operators, `transform`ed."""
    return builders(lambda cell, eps: transform(composed(cell, eps)), _EXPRESSION_ALLOWANCE)


# Each operator of torch's expression rounds: a gate, the sum, the norm, 1 + scale, the product and y. Its y was up to
# 1.7 tolerances off on an H200, its dx up to 3.2.
_EXPRESSION_ALLOWANCE = 4.0

_VALUES = ("y", "residual_out")
_GRADIENTS = ("dx", "dscale", "dshift", "dgate", "dresidual")


def _operands(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    given = (inputs.x, *inputs.modulation)
    return given if inputs.residual is None else (*given, inputs.residual)


def _given(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the outputs. The sum's gradient may be any rows, so the residual serves."""
    assert inputs.dy is not None
    return (inputs.dy,) if inputs.residual is None else (inputs.dy, inputs.residual)


def _outputs(returned: Any) -> tuple[torch.Tensor, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


def _cell(inputs: Inputs) -> ModulatedCell:
    assert isinstance(inputs.cell, ModulatedCell)
    return inputs.cell
