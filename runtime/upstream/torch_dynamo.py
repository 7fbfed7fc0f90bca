"""Functions that TorchDynamo is to run as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def eager_only(*functions: Callable[..., object]) -> None:
    """Have TorchDynamo run functions, and all that they call, rather than compile them.

    It follows none of them while it traces. But of a call that raised an error it gives up the frames, runs them
    from then on, and tries to compile what they call in turn, down to a launch. torch.compiler.disable says the same
    with a wrapper, which every eager call would pass through. This leaves a mark in the code, as torch marks what it
    skips itself; that it does so in another way in some release costs no more than what is described above.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not all(hasattr(frames, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")):
        return
    skip = frames._FrameAction.SKIP
    for function in functions:
        # The frame itself, and the frames of what it calls.
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
