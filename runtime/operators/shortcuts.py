"""The ways to an operator's kernel that leave out what torch does besides, where that comes to nothing.

Of an operator with a gradient, torch runs a kernel in Python for autograd, which calls the operator anew below that:
each argument is made a value of C++ and an object of Python twice. A call that autograd records nothing of, and that
nobody else is to see, is answered by the first kernel. The code that Inductor writes calls no operator at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..upstream.torch_dynamo import eager_only
from ..upstream.torch_internals import dispatch_modes, ends_with_autograd, transforming

Kernel = Callable[..., Any]
Operator = torch._ops.OpOverload[Any, Any]

# Where it stands: torch's own attributes are looked up by what takes as long again.
is_grad_enabled = torch.is_grad_enabled
# What torch's own kernel for autograd asks.
_any_requires_grad = torch._C._any_requires_grad

# What arguments are where no class of tensors sees operators.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.dtype, type(None), str, float, int, bool, list))


def of_plain_tensors(kernel: Kernel, otherwise: Kernel) -> Kernel:
    """A kernel that leaves a call to another one where a mode or a class sees operators."""

    @eager_only
    def run(*arguments: Any) -> Any:
        if dispatch_modes() or not _PLAIN.issuperset(map(type, arguments)):
            return otherwise(*arguments)
        return kernel(*arguments)

    return run


class Recording:
    """Stands for a library while autograd is registered: has torch's kernel answer what it would record nothing of."""

    def __init__(self, library: torch.library.Library, kernels: Mapping[str, Kernel]) -> None:
        """Take the library, and the kernels of operators for plain tensors, by name."""
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
    """What Inductor's code is to call in place of an operator: a kernel for plain tensors, the only ones it has."""

    @eager_only
    def run(*arguments: Any) -> Any:
        # That code runs without gradients. Who would record one finds the operator, as do modes and transforms.
        if is_grad_enabled() or dispatch_modes() or transforming():
            return operator(*arguments)
        return kernel(*arguments)

    return run
