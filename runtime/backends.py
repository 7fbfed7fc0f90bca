"""Where the functional API runs kernels, and where torch's own operators."""

from __future__ import annotations

import os

import torch
from torch.compiler import is_dynamo_compiling

from . import kernels


def backend(x: torch.Tensor) -> str:
    """What the functional API and the modules run on x.

    Returns:
        "kernel" on a GPU, and on a CPU under TRITON_INTERPRET=1, when Triton's interpreter runs the kernels; "torch",
        torch's own operator, anywhere else.
    """
    if x.is_cuda:
        return "kernel"
    if x.device.type != "cpu":
        return "torch"
    if is_dynamo_compiling():
        from . import trace_constants

        return "kernel" if trace_constants.interpreting() else "torch"
    return "kernel" if interpreting() else "torch"


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels of CPU tensors."""
    # Without the variable there is nothing to ask Triton, which takes a while to import and need not be installed.
    return "TRITON_INTERPRET" in os.environ and kernels.interpreting()
