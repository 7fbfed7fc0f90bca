"""The choice between kernels and torch's own operators in the functional API."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..dtypes import FLOATS
from ..kernels import gpu
from ..upstream.torch_internals import constant_in_traces, dispatch_modes, has_tangent, jit_tracing, left_in_traces

logger = logging.getLogger("normforge")


def backend(x: torch.Tensor) -> str:
    """Return the word for what the functional API and the modules run on x.

    Returns:
        "kernel" on a GPU, and on a CPU under TRITON_INTERPRET=1, when Triton's interpreter runs the kernels; "torch",
        torch's own operator, anywhere else, and for float64. See `layer_norm` for where a call is left to torch
        whatever x is.
    """
    runs = x.is_cuda or (x.device.type == "cpu" and _interpreting())
    return "kernel" if runs and x.dtype is not torch.float64 else "torch"


@constant_in_traces
def _interpreting() -> bool:
    """Return True if Triton's interpreter runs the kernels of CPU tensors."""
    # Without the variable there is nothing to ask Triton, which takes a while to import and need not be installed.
    return "TRITON_INTERPRET" in os.environ and gpu.interpreting()


def intercepted(*tensors: torch.Tensor | None) -> bool:
    """Return True if a mode, or a class such as that of fake tensors, sees the operators that take the tensors."""
    return dispatch_modes() > 0 or any(sees_operators(tensor) for tensor in tensors)


def sees_operators(tensor: object) -> bool:
    """Return True if torch's dispatcher hands operators to the tensor's class, such as fake and distributed tensors."""
    return isinstance(tensor, torch.Tensor) and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def is_served(operands: tuple[Any, ...], eps: Any = None) -> bool:
    """Return True if kernels take the tensors (x first) and eps of a module's call, or if torch.fx records the call."""
    if not isinstance(operands[0], torch.Tensor):
        return True
    for tensor in operands:
        if tensor is not None and (
            (tensor.__class__ not in (torch.Tensor, torch.nn.Parameter) and _is_foreign(type(tensor)))
            or tensor.layout is not torch.strided
            or tensor.is_nested
        ):
            return False
    # A graph holds a scalar of NumPy's or a tensor, which may be another one in each run.
    is_number = isinstance(eps, (int, float))
    fits = 0.0 <= eps <= torch.finfo(torch.float32).max if is_number else eps is None or not is_dynamo_compiling()
    fits = fits and backend(operands[0]) == "kernel" and not left_to_torch(operands)
    return fits and all(tensor is None or tensor.dtype in FLOATS for tensor in operands)


@constant_in_traces
def _is_foreign(cls: type) -> bool:
    """Return True if a class of tensors decides what functions do, unless torch traces or distributes by it."""
    if cls.__module__.startswith(("torch._subclasses.f", "torch.distributed.")):
        return False
    function: Any = getattr(cls, "__torch_function__", None)
    plain: Any = torch.Tensor.__torch_function__
    functions = (plain.__func__, torch._C._disabled_torch_function_impl)
    decides = getattr(function, "__func__", function) not in functions
    return decides or getattr(cls, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__


def left_to_torch(operands: tuple[torch.Tensor | None, ...]) -> bool:
    """Return True if torch's own operator serves a call, although kernels run where the tensors are.

    Kernels take neither float64 nor rows of no elements. And only of its own operators does torch know how they are
    transformed (torch.func), differentiated forward and recorded (torch.jit.trace).
    """
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    if any(tensor.dtype is torch.float64 for tensor in tensors):
        if not is_dynamo_compiling():
            _say_once_of_float64()
        return True
    if left_in_traces() or (not is_dynamo_compiling() and (jit_tracing() or has_tangent(tensors))):
        return True
    # Not numel(), which is 0 also where there are no rows, and may be unknown in a trace.
    return any(tensor.dim() > 0 and tensor.shape[-1] == 0 for tensor in tensors)


@functools.cache
def _say_once_of_float64() -> None:
    logger.warning(
        "a norm of float64 runs torch's own operator: normforge's kernels take float16, bfloat16 and float32"
    )
