"""Private questions to torch about what observes the operators that run, and ways to apply autograd functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as modules

from .torch_dynamo import constant_in_traces

# True within a transform of torch.func, or within autograd's batched gradients, which are built on the same mechanism.
# TorchDynamo takes this question in every release from 2.11, but refuses the question for their number in 2.11.
transforming: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)

# True for a tensor that represents another within such a transform, with no memory of its own. If torch lacks the
# question, asking for the address fails.
is_transformed: Callable[[torch.Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda tensor: False
)

# The number of modes that see each operator: those of make_fx, torch.export and FakeTensorMode among others.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

# Sets whether autograd records in this thread; torch.set_grad_enabled does this in Python and takes 0.5 us longer.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled

# True for a tensor that shares memory until one of the two is written to; asking for its address copies the tensor.
is_copied_on_write: Callable[[torch.Tensor], bool] = getattr(torch._C, "_is_cow_tensor", lambda tensor: False)


# Truthy if hooks watch the calls of every module, as torch.nn.modules.module.register_module_forward_hook adds them.
global_hooks: Callable[[], Any] = modules._has_any_global_hook


def jit_tracing() -> bool:
    """Return True if torch.jit.trace records the operators that run."""
    return not torch.compiler.is_dynamo_compiling() and torch._C._get_tracing_state() is not None


@constant_in_traces
def left_in_traces() -> bool:
    """Return True within a transform of torch.func, and while torch.onnx.export runs: both know torch's operators only.

    TorchDynamo itself guards which transforms are active.
    """
    # Programs that export have imported torch.onnx.
    onnx = sys.modules.get("torch.onnx")
    return transforming() or (onnx is not None and bool(onnx.is_in_onnx_export()))


# Torch declares no types for unpack_dual.
_unpack_dual: Callable[[torch.Tensor], Any] = forward_ad.unpack_dual


@constant_in_traces
def is_forward_ad_on() -> bool:
    """Return True within a level of forward-mode AD, as jvp and jacfwd enter one."""
    return forward_ad._current_level >= 0


def has_tangent(tensors: list[torch.Tensor]) -> bool:
    """Return True if forward-mode AD differentiates by any of some tensors."""
    # Outside every level no tensor has a tangent.
    return forward_ad._current_level >= 0 and any(_unpack_dual(tensor).tangent is not None for tensor in tensors)


def saved_tensors_hooks() -> object:
    """Return the hooks on tensors that autograd saves, as checkpoint and offloading set them, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


# By sets of dispatch keys, as numbers: True if autograd's kernel is the last before a kernel that reads memory.
_ends: dict[int, bool] = {}


def ends_with_autograd(keys: torch._C.DispatchKeySet) -> bool:
    """Return True if only autograd sees an operator before the kernel of its tensors' device.

    Modes, fake tensors and other classes that see operators have keys of their own, as have functionalised tensors and
    tensors that represent the negatives of their memory.
    """
    number: int = keys.raw_repr()
    found = _ends.get(number)
    if found is None:
        below = keys & torch._C._after_ADInplaceOrView_keyset
        devices = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
        found = any(below.raw_repr() == torch._C.DispatchKeySet(device).raw_repr() for device in devices)
        _ends[number] = found
    return found


Apply = Callable[..., Any]


def applied(function: type[torch.autograd.Function]) -> Apply:
    """Return `apply` of an autograd function, the public way."""
    apply: Apply = function.apply
    return apply


def applied_at_once(function: type[torch.autograd.Function]) -> Apply:
    """Return `apply` without the preparation for transforms of torch.func, which takes 2.5 us of Python.

    The public `apply` ends with this method of the C class.
    """
    bare: Any = super(torch.autograd.Function, function)
    apply: Apply = bare.apply
    return apply
