"""Compiled kernels: one per `KernelKey` and device, compiled or loaded once for all threads.

A kernel comes from a folder that was compiled ahead of time, else from Triton's cache on disk. Otherwise Triton
compiles the kernel, unless NORMFORGE_FROZEN forbids compiling.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

from .. import settings
from ..call_kinds import ROTARY
from ..codegen.values import SEVERAL
from ..errors import CacheError, FrozenError
from ..locks import fork_safe
from .gpu import KernelKey, Target

_compiled: dict[tuple[KernelKey, int], Any] = {}
_lock = fork_safe(threading.Lock())
# One lock per key and device, so that several kernels can be compiled at once.
_locks: defaultdict[tuple[KernelKey, int], threading.RLock] = defaultdict(lambda: fork_safe(threading.RLock()))


# Has the attribute `only_compiled`, True within the context manager `only_compiled`.
_this_thread = threading.local()


@contextmanager
def only_compiled() -> Iterator[None]:
    """Limit this thread to loaded kernels within a context; any other kernel raises a FrozenError.

    A kernel must not be loaded while a CUDA graph is captured.
    """
    before, _this_thread.only_compiled = getattr(_this_thread, "only_compiled", False), True
    try:
        yield
    finally:
        _this_thread.only_compiled = before


def obtain(key: KernelKey, function: Any, target: Target, device: int) -> Any:
    """Return the compiled kernel of a key on a device, which must be the current device.

    Threads that race get one and the same kernel.

    Args:
        key: the compilation.
        function: the `triton.JITFunction` that `key` names.
        target: the target of the device.
        device: the index of the device.

    Raises:
        FrozenError: the kernel would have to be compiled, and NORMFORGE_FROZEN is 1; or loaded, within `only_compiled`.
        AotError: the folder of kernels compiled ahead of time does not fit.
        CacheError: Triton cannot write what it compiles.
    """
    kernel = _compiled.get((key, device))
    if kernel is None:
        if getattr(_this_thread, "only_compiled", False):
            raise FrozenError(
                f"{key} is not loaded on device {device}, and a CUDA graph is being captured; make the call once before"
            )
        with _lock:
            lock = _locks[key, device]
        with lock:
            kernel = _compiled.get((key, device))
            if kernel is None:
                from . import binaries

                folder = binaries.loaded()
                kernel = (folder and folder.find(key, function, target)) or compile_for(key, function, target)
                with _lock, _writing():
                    _start_driver()
                # Triton loads a kernel when its launcher is first read, and sets the launcher before the kernel is
                # loaded: a thread that read the launcher meanwhile would launch nothing.
                with _writing():
                    _ = kernel.run
                _compiled[key, device] = kernel
    return kernel


def obtained() -> tuple[tuple[KernelKey, int], ...]:
    """Return the keys of all kernels obtained so far, each with the index of the device."""
    return tuple(_compiled)


def compile_for(key: KernelKey, function: Any, target: Target) -> Any:
    """Return a kernel from Triton's cache on disk or from Triton's compiler, without loading the kernel.

    The target GPU need not be present. If the cache has moved since normforge was imported, the former folder is
    asked first.

    Args:
        key: the compilation.
        function: the `triton.JITFunction` that `key` names.
        target: the GPU to compile for.

    Raises:
        FrozenError: the kernel would have to be compiled, and NORMFORGE_FROZEN is 1.
        CacheError: Triton cannot write what it compiles.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from ..upstream import triton_hashes

    triton_hashes.settle(function)
    source, refuse, cache = key.source(function), partial(_refuse, key, target), triton.knobs.cache
    backend, arch = ("cuda", int(target.arch[3:])) if target.is_nvidia else ("hip", target.arch)
    # Triton's own launch passes the first two options as well.
    options = {
        "debug": function.debug or triton.knobs.runtime.debug,
        "instrumentation_mode": triton.knobs.compilation.instrumentation_mode,
        **dict(key.options),
    }
    compiled = partial(triton.compile, source, target=GPUTarget(backend, arch, target.warp_size), options=options)
    # Triton asks a source for the intermediate representation only after a miss in the cache.
    source.make_ir = refuse
    if cache.dir != (former := settings.TRITON_CACHE or cache.get_triton_dir("cache")):
        with cache.scope(), suppress(FrozenError, OSError):
            cache.dir = former
            return compiled()
    if not settings.frozen():
        del source.make_ir
    with _writing(refuse):
        return compiled()


@contextmanager
def _writing(refuse: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Raise a CacheError if Triton cannot write a file within; under NORMFORGE_FROZEN=1, call `refuse` first."""
    try:
        yield
    except OSError as error:
        if settings.frozen():
            # Triton makes the folder of a kernel that its cache lacks before it asks for the representation.
            refuse()
        raise CacheError(
            f"Triton cannot write what it compiles ({error}); make room, or name other folders for its cache and its "
            "temporary files: TRITON_CACHE_DIR and TMPDIR"
        ) from error


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
    if key.symbol in ROTARY or key.symbol.startswith(SEVERAL):
        how = "by making the call once without NORMFORGE_FROZEN"
    raise FrozenError(
        f"NORMFORGE_FROZEN=1 forbids compiling {key} for {target.arch}, and Triton's cache does not hold it"
        f"{elsewhere}; compile it before {how}, or of calls that were recorded, `normforge aot --recorded FILE`, or "
        "unset NORMFORGE_FROZEN"
    )


def _start_driver() -> None:
    # Triton starts the driver on first use, and concurrent threads would each start a driver.
    import triton

    _ = triton.runtime.driver.active.utils
