"""The twin of each operator, which is batch invariant wherever it runs: what is traced under batch invariance.

Whether a call is to be so is asked of the thread that makes it. A graph is run by others, autograd's threads say, and
what Inductor or a CUDA graph keeps of it by anybody: so it holds operators that need not ask.
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
    """What computes the same, batch invariant."""

    @eager_only
    def run(*arguments: Any, **named: Any) -> Any:
        if is_on():
            return kernel(*arguments, **named)
        with batch_invariant():
            return kernel(*arguments, **named)

    return run


def both(name: str, kernel: Kernel) -> dict[str, Kernel]:
    """The kernels of an operator and of its twin, by their names."""
    return {name: kernel, f"{name}{INVARIANT}": within(kernel)}


def register_autograd(
    namespace: str, name: str, differentiate: Kernel, keep: Kernel, library: torch.library.Library
) -> None:
    """Give an operator what differentiates it, and its twin the same, of operators that are twins."""
    for each, function in both(name, differentiate).items():
        torch.library.register_autograd(f"{namespace}::{each}", function, setup_context=keep, lib=library)
