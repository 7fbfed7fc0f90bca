"""The gradient of a gradient, which no kernel computes: torch's operators differentiate the formula of the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ..errors import GradientError

Tensors = Sequence["torch.Tensor | None"]


def differentiated(
    compute: Callable[..., Tensors], operands: Tensors, due: Sequence[bool], arrived: Tensors
) -> list[torch.Tensor | None]:
    """The gradients of some operands, given those of what is computed from them.

    Args:
        compute: from the operands to results, by torch's operators.
        operands: those of the call.
        due: of which a gradient is asked.
        arrived: of each result; None where none did.

    Returns:
        A gradient for each operand; None where none is due, or the results do not depend on it. They can be
        differentiated in turn if gradients are enabled.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views of what is in the graph already, or leaves of a graph that ends here.
        given = [
            None if operand is None else operand.view_as(operand) if again else operand.detach().requires_grad_(needed)
            for operand, needed in zip(operands, due, strict=True)
        ]
        pairs = [
            (result, gradient)
            for result, gradient in zip(compute(*given), arrived, strict=True)
            if result is not None and gradient is not None and result.requires_grad
        ]
    wanted = [operand for operand, needed in zip(given, due, strict=True) if operand is not None and needed]
    if not pairs or not wanted:
        return [None] * len(given)
    results, gradients = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(results, wanted, gradients, create_graph=again, allow_unused=True))
    return [next(found) if operand is not None and needed else None for operand, needed in zip(given, due, strict=True)]


def refuse_double_backward(ctx: Any, *gradients: Any) -> NoReturn:
    """What stands for the gradient of a gradient where there is none: of rows that are split over ranks."""
    raise GradientError(
        "a gradient of normforge's gradient was asked (a double backward) and no kernel computes it; "
        "use torch.nn.functional's norm there, or normforge.unpatch(model)"
    )
