"""The gradient of a gradient, which there is none of."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import GradientError


def refuse_double_backward(ctx: Any, *gradients: Any) -> NoReturn:
    """What stands for the gradient of a gradient."""
    raise GradientError(
        "a gradient of normforge's gradient was asked (a double backward) and no kernel computes it; "
        "use torch.nn.functional's norm there, or normforge.unpatch(model)"
    )
