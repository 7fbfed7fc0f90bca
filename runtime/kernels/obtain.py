"""Compiled kernels: one per `KernelKey` and device, made once, whichever thread asks first.

A folder that was compiled ahead of time is asked first, then Triton's cache on disk; then Triton compiles, unless
NORMFORGE_FROZEN forbids it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from .. import settings
from ..errors import FrozenError
from ..locks import fork_safe
from .gpu import Target
from .key import KernelKey

_compiled: dict[tuple[KernelKey, int], Any] = {}
_lock = fork_safe(threading.Lock())
# One for each key and device: several kernels may be compiled at once.
_locks: defaultdict[tuple[KernelKey, int], threading.RLock] = defaultdict(lambda: fork_safe(threading.RLock()))


# Has `only_compiled` within the context of that name.
_this_thread = threading.local()


@contextmanager
def only_compiled() -> Iterator[None]:
    """A context in which this thread gets the kernels that are loaded, and a FrozenError for any other.

    Loading one is nothing that may be done while a CUDA graph is captured.
    """
    before, _this_thread.only_compiled = getattr(_this_thread, "only_compiled", False), True
    try:
        yield
    finally:
        _this_thread.only_compiled = before


def obtain(key: KernelKey, function: Any, target: Target, device: int) -> Any:
    """The compiled kernel of a key on a device, which must be the current one; threads that race get the same one.

    Args:
        key: which compilation.
        function: the `triton.JITFunction` that key names.
        target: the device's.
        device: its index.

    Raises:
        FrozenError: it would have to be compiled, and NORMFORGE_FROZEN is 1; or loaded, within `only_compiled`.
        AotError: the folder of kernels compiled ahead of time does not fit.
    """
    found = _compiled.get((key, device))
    if found is None:
        if getattr(_this_thread, "only_compiled", False):
            raise FrozenError(
                f"{key} is not loaded on device {device}, and a CUDA graph is being captured; make the call once before"
            )
        with _lock:
            lock = _locks[key, device]
        with lock:
            found = _compiled.get((key, device))
            if found is None:
                from . import binaries

                found = binaries.find(key, function, target) or compile_for(key, function, target)
                with _lock:
                    _start_driver()
                # Triton loads a kernel when its launcher is first asked for, and has the launcher before it has the
                # kernel: a thread that asked meanwhile would launch nothing.
                _ = found.run
                _compiled[key, device] = found
    return found


def obtained() -> tuple[tuple[KernelKey, int], ...]:
    """Everything compiled so far, with the index of its device."""
    return tuple(_compiled)


def compile_for(key: KernelKey, function: Any, target: Target) -> Any:
    """A kernel from Triton's cache on disk or its compiler, for a GPU that need not be here; it is not loaded.

    Args:
        key: which compilation.
        function: the `triton.JITFunction` that key names.
        target: what to compile for.

    Raises:
        FrozenError: it would have to be compiled, and NORMFORGE_FROZEN is 1.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from ..upstream import triton_hashes

    triton_hashes.settle(function)
    source = key.source(function)
    if settings.frozen():
        # Triton asks a source for its intermediate representation only once its cache has turned out to lack it.
        source.make_ir = partial(_refuse, key, target)
    backend, arch = ("cuda", int(target.arch[3:])) if target.is_nvidia else ("hip", target.arch)
    # The first two are those of Triton's own launch.
    options = {
        "debug": function.debug or triton.knobs.runtime.debug,
        "instrumentation_mode": triton.knobs.compilation.instrumentation_mode,
        **dict(key.options),
    }
    return triton.compile(source, target=GPUTarget(backend, arch, target.warp_size), options=options)


def _refuse(key: KernelKey, target: Target, *_: Any, **__: Any) -> NoReturn:
    from . import binaries

    folder = binaries.loaded()
    elsewhere = "" if folder is None else f", and neither does {folder.path}"
    how = (
        f"with normforge.warmup, `normforge warmup` or `normforge aot` and N = {key.n} "
        "(normforge.compile_keys lists what they compile)"
    )
    if key.n is None:
        how = (
            "with normforge.warmup(shapes=...), `normforge warmup --shape` or `normforge aot --shape`, and x's shape "
            "with how many groups a sample has: 2x320x64x64/32"
        )
    raise FrozenError(
        f"NORMFORGE_FROZEN=1 forbids compiling {key} for {target.arch}, and Triton's cache does not hold it"
        f"{elsewhere}; compile it before {how}, or of calls that were recorded, `normforge aot --recorded FILE`, or "
        "unset NORMFORGE_FROZEN"
    )


def _start_driver() -> None:
    # Triton starts it when it is first asked for, and threads that ask at once would each start one.
    import triton

    _ = triton.runtime.driver.active.utils
