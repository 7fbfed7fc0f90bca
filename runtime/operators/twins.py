"""The twin of each operator, which is always batch invariant, for traces under batch invariance.

Batch invariance is a state of the calling thread. Other threads, autograd's for example, may run a graph, or the code
that Inductor or a CUDA graph made of the graph, so graphs hold operators that do not depend on that state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..calls.traced import INVARIANT
from ..selection.batch import batch_invariant
from ..selection.invariance import is_on
from ..upstream.torch_dynamo import eager_only

Kernel = Callable[..., Any]


def within(kernel: Kernel) -> Kernel:
    """Return a kernel that runs under batch invariance."""

    @eager_only
    def run(*arguments: Any, **named: Any) -> Any:
        if is_on():
            return kernel(*arguments, **named)
        with batch_invariant():
            return kernel(*arguments, **named)

    return run


def both(name: str, kernel: Kernel) -> dict[str, Kernel]:
    """Return the kernels of an operator and of its twin, by name."""
    return {name: kernel, f"{name}{INVARIANT}": within(kernel)}


def register_autograd(
    namespace: str, name: str, differentiate: Kernel, keep: Kernel, library: torch.library.Library
) -> None:
    """Register the gradients of an operator, and for its twin the batch-invariant gradients."""
    for each, function in both(name, differentiate).items():
        torch.library.register_autograd(f"{namespace}::{each}", function, setup_context=keep, lib=library)
