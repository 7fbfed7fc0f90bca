"""Kernels of torch's own operators: taken from its dispatcher, replaced there, and put back."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..locks import fork_safe

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
