"""Marks of functions for TorchDynamo, which traces programs for torch.compile, at the functions' definitions.

torch.compiler's decorators for this purpose import TorchDynamo, which takes a second, or wrap the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])


def constant_in_traces(function: F) -> F:
    """Have TorchDynamo take a function's result as a constant, rather than trace the function."""
    # torch.compiler.assume_constant_result does no more than this.
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def eager_below(function: F) -> F:
    """Have TorchDynamo trace a function, but run all that it calls wherever it runs the function; see `eager_only`."""
    return _marked(function, "DEFAULT")


def eager_only(function: F) -> F:
    """Have TorchDynamo run a function, and all that it calls, rather than compile them.

    TorchDynamo follows none of these functions while it traces. But after a call raises an error, TorchDynamo gives up
    the frames of the call, runs them from then on, and tries to compile each function that they call, down to a launch.
    torch.compiler.disable prevents this with a wrapper, which every eager call would pass through. `eager_only` leaves
    a mark in the code, as torch marks the functions that it skips itself. If a release marks them in another way, the
    cost is no more than is described above.
    """
    return _marked(function, "SKIP")


def known_to_hold(condition: bool | torch.SymBool) -> bool:
    """Return True if a condition holds for all values of dynamic sizes; the question adds no guard."""
    # The import brings sympy, which tracing has imported. To TorchDynamo such a condition is an instance of bool too.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def _marked(function: F, action: str) -> F:
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if all(hasattr(frames, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")):
        actions = frames._FrameAction
        # The actions for the function's own frame, and for the frames of the functions that it calls.
        strategy = frames._FrameExecStrategy(getattr(actions, action), actions.SKIP)
        frames.set_code_exec_strategy(function.__code__, strategy)
    return function
