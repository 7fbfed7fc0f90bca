"""Marks of functions for TorchDynamo, which traces programs for torch.compile, at the functions' definitions.

torch.compiler has decorators for the same. Those import TorchDynamo, which takes a second, or wrap the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])


def constant_in_traces(function: F) -> F:
    """Have TorchDynamo take what a function returns for constant, rather than follow how it is found out."""
    # All that torch.compiler.assume_constant_result does.
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def eager_below(function: F) -> F:
    """Have TorchDynamo trace a function, but run all that it calls wherever it runs the function; see `eager_only`."""
    return _marked(function, "DEFAULT")


def eager_only(function: F) -> F:
    """Have TorchDynamo run a function, and all that it calls, rather than compile them.

    It follows none of them while it traces. But of a call that raised an error it gives up the frames, runs them
    from then on, and tries to compile what they call in turn, down to a launch. torch.compiler.disable says the same
    with a wrapper, which every eager call would pass through. This leaves a mark in the code, as torch marks what it
    skips itself; that it does so in another way in some release costs no more than what is described above.
    """
    return _marked(function, "SKIP")


def known_to_hold(condition: bool | torch.SymBool) -> bool:
    """Return True if a condition holds for all values of dynamic sizes; the question adds no guard."""
    # It imports sympy, which whoever traces has. To TorchDynamo such a condition is an instance of bool too.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def _marked(function: F, action: str) -> F:
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if all(hasattr(frames, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")):
        actions = frames._FrameAction
        # What is done with the function's own frame, and with those of what it calls.
        strategy = frames._FrameExecStrategy(getattr(actions, action), actions.SKIP)
        frames.set_code_exec_strategy(function.__code__, strategy)
    return function
