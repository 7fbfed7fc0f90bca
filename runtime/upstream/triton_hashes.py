"""One hash for a kernel, whichever process asks for the hash, and whatever the process compiled before.

Triton's cache on disk knows a kernel by a hash that takes in the constants of the device functions it calls, but only
of those that were hashed before it: `DependenciesFinder._update_hash` asks a function for its constants first, and for
its hash, which finds them, afterwards (Triton 3.6 and 3.7). A kernel that warm-up had compiled was then not found by a
process that asked for kernels in another order, nor one whose kernel Triton's own launch had hashed.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

from ..locks import fork_safe

_lock = fork_safe(threading.Lock())
# By id, because the hash of a JITFunction in Python is the hash that is to be settled.
_settled: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def settle(function: Any) -> None:
    """Have Triton hash all device functions of a kernel's folder, in the order in which they stand, then the kernel.

    Args:
        function: a `triton.JITFunction` of a generated module.
    """
    package = function.__module__.rpartition(".")[0]
    primitives = vars(sys.modules[f"{package}.primitives"])
    with _lock:
        for value in (*primitives.values(), function):
            # Only device functions have a cache key.
            if not hasattr(type(value), "cache_key") or _settled.get(id(value)) is value:
                continue
            # Triton may have computed this hash before it knew all constants.
            value.hash = None
            _ = value.cache_key
            _settled[id(value)] = value
