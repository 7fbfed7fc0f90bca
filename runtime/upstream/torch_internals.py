"""Private questions to torch about what observes the operators that run, marks for TorchDynamo, and autograd functions.

torch.compiler's decorators that mark functions for TorchDynamo, which traces programs for torch.compile, import
TorchDynamo, which takes a second, or wrap the function.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as modules

from ..locks import fork_safe

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


# True within a transform of torch.func, or within autograd's batched gradients, which are built on the same mechanism.
# TorchDynamo takes this question in every release from 2.11, but refuses the question for their number in 2.11.
transforming: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)

# True for a tensor that represents another within such a transform, with no memory of its own. If torch lacks the
# question, asking for the address fails.
is_transformed: Callable[[torch.Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda tensor: False
)


def is_sharded(*operands: object) -> bool:
    """Return True if any operand is a DTensor."""
    # A module that is not imported has no instances.
    module = getattr(torch.distributed, "tensor", None)
    return module is not None and any(isinstance(operand, module.DTensor) for operand in operands)


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


def ends_with_autograd(keys: torch._C.DispatchKeySet) -> bool:
    """Return True if only autograd sees an operator before the kernel of its tensors' device.

    Modes, fake tensors and other classes that see operators have keys of their own, as have functionalised tensors and
    tensors that represent the negatives of their memory.
    """
    return _end_with_autograd(keys.raw_repr())


@cache
def _end_with_autograd(keys: int) -> bool:
    below = torch._C.DispatchKeySet.from_raw_repr(keys) & torch._C._after_ADInplaceOrView_keyset
    devices = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
    return any(below.raw_repr() == torch._C.DispatchKeySet(device).raw_repr() for device in devices)


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


# A kernel of an operator: takes the dispatch keys that are left, and the operator's arguments.
Kernel = Callable[..., Any]

# Replaced kernels, and since when they are, oldest first. They are kept alive for longer than a call lasts, because
# another thread may be in one of theirs, and torch frees them beneath it. By time and not by number: of switches that
# followed each other at once, 64 were over before a thread that waited for a core was.
_retired: deque[tuple[float, object]] = deque()
_KEPT_SECONDS = 60.0
_retiring = fork_safe(threading.Lock())


def kernel_of(operator: str, key: str) -> Kernel | None:
    """Return the kernel of an aten operator for a dispatch key, or its decomposition; None if there is neither."""
    try:
        return torch.library.get_kernel(f"aten::{operator}", key).call_boxed
    except RuntimeError:
        from torch._decomp import decomposition_table

        decomposed = decomposition_table.get(getattr(torch.ops.aten, operator).default)
        return None if decomposed is None else lambda keys, *arguments: decomposed(*arguments)


class Replacement:
    """Kernels that stand in place of torch's for a dispatch key, until they are removed."""

    def __init__(self, kernels: Mapping[str, Kernel], key: str) -> None:
        """Replace the kernels.

        Args:
            kernels: by the names of aten's operators.
            key: the dispatch key.
        """
        # Torch declares no types for Library.
        library: Any = torch.library.Library
        self._library = library("aten", "IMPL")
        self._key, self._operators = key, tuple(kernels)
        with warnings.catch_warnings():
            # Torch warns once, for all operators together, that a kernel is overridden.
            warnings.filterwarnings("ignore", message=".*operators may also be overridden", category=UserWarning)
            for operator, kernel in kernels.items():
                self._library.impl(operator, kernel, key, with_keyset=True)

    def remove(self) -> None:
        """Put back the kernels that were replaced. Calls in progress in other threads end as they began."""
        kernels = [torch.library.get_kernel(f"aten::{operator}", self._key) for operator in self._operators]
        now = time.monotonic()
        with _retiring:
            _retired.append((now, kernels))
            while _retired[0][0] < now - _KEPT_SECONDS:
                _retired.popleft()
        self._library._destroy()


def without_torchs_own_overrides(operators: Sequence[str]) -> AbstractContextManager[object]:
    """Return a context without torch's own replacements of its kernels (`torch.backends.python_native`).

    The kernels beneath the replacements can be taken meanwhile. A kernel that was taken is of no use once its owner has
    gone, so neither side may hold a kernel of the other.
    """
    native = getattr(torch.backends, "python_native", None)
    return nullcontext() if native is None else native.operations_disabled(*operators)
