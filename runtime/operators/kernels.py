"""The kernels that operators are registered with: direct ways to a kernel, and twins under batch invariance.

For an operator with a gradient, torch runs a Python kernel for autograd, which calls the operator again below autograd:
each argument is converted between C++ and Python twice. The first kernel answers a call that autograd does not record
and no mode sees. Inductor's code calls no operator at all.

The twin of an operator is always batch invariant, for traces under batch invariance, which is a state of the calling
thread. Other threads, autograd's for example, may run a graph, or the code that Inductor or a CUDA graph made of the
graph, so graphs hold operators that do not depend on that state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..calls.record import reentering
from ..calls.traced import INVARIANT
from ..upstream.torch_internals import dispatch_modes, eager_only, ends_with_autograd, transforming

NAMESPACE = "normforge"

Kernel = Callable[..., Any]
Operator = torch._ops.OpOverload[Any, Any]

# A global, because the attribute look-up in torch takes as long as the call.
is_grad_enabled = torch.is_grad_enabled
# The condition of torch's own kernel for autograd.
_any_requires_grad = torch._C._any_requires_grad

# The classes of arguments of calls that no tensor class sees.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.dtype, type(None), str, float, int, bool, list))


def of_plain_tensors(kernel: Kernel, otherwise: Kernel) -> Kernel:
    """Return a kernel that calls `otherwise` if a mode or a tensor class sees operators."""

    @eager_only
    def run(*arguments: Any) -> Any:
        if dispatch_modes() or not _PLAIN.issuperset(map(type, arguments)):
            return otherwise(*arguments)
        return kernel(*arguments)

    return run


class Recording:
    """A proxy of a library for registering autograd, whose kernel directly answers calls that need no recording."""

    def __init__(self, library: torch.library.Library, kernels: Mapping[str, Kernel]) -> None:
        """Store the library, and the kernels of operators for plain tensors, by name."""
        self._library: Any = library
        self._kernels = kernels

    def impl(self, name: str, recorded: Kernel, key: str, **options: Any) -> None:
        """Register torch's kernel for autograd, with ours before it."""
        kernel = self._kernels[name]

        @eager_only
        def run(keys: torch._C.DispatchKeySet, *arguments: Any) -> Any:
            if ends_with_autograd(keys) and not (is_grad_enabled() and _any_requires_grad(*arguments)):
                return kernel(*arguments)
            return recorded(keys, *arguments)

        of_autograd = key == "Autograd" and options == {"with_keyset": True}
        self._library.impl(name, run if of_autograd else recorded, key, **options)


def at_once(operator: Operator, kernel: Kernel) -> Kernel:
    """Return the function for Inductor's code to call in place of an operator: Inductor has plain tensors alone."""

    @eager_only
    def run(*arguments: Any, **last: Any) -> Any:
        # Inductor's code runs without gradients. Recorded calls, modes and transforms use the operator.
        if is_grad_enabled() or dispatch_modes() or transforming():
            return operator(*arguments, **last)
        # Inductor names the last arguments, those with a default.
        return kernel(*arguments, *last.values())

    return run


def both(name: str, kernel: Kernel) -> dict[str, Kernel]:
    """Return the kernels of an operator and of its twin, by name."""
    return {name: kernel, f"{name}{INVARIANT}": reentering(kernel)}


def register_autograd(library: torch.library.Library, name: str, differentiate: Kernel, keep: Kernel) -> None:
    """Register the gradients of an operator, and for its twin the batch-invariant gradients."""
    for each, function in both(name, differentiate).items():
        torch.library.register_autograd(f"{NAMESPACE}::{each}", function, setup_context=keep, lib=library)
