"""Launches of a compiled kernel without the work that `kernel[grid](...)` does again for every launch.

That work (each argument bound, specialised and hashed, two dictionary look-ups) takes 9 to 19 us of Python, and comes
to the same for every launch of a prepared call. Triton's own launcher is called without it. This inner interface is
private to Triton and changes between releases, so it is used here alone, recognised by its signature, and not used if
the signature is unknown.

Beside it stands a launcher in C, which takes a launch's values unchanged and prepares the rest once. `native.c`, which
also finds known calls, is compiled once per machine, as Triton compiles its own launcher and into the same cache. The
library is optional: if it cannot be compiled, or does not know a kernel, launches go through Triton's launcher.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import logging
import sysconfig
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import settings
from ..locks import fork_safe

logger = logging.getLogger("normforge")

Grid = tuple[int, int, int]
# Takes the programs in each dimension, and the values that a launch brings: pointers as addresses.
Launch = Callable[[Grid, tuple[Any, ...]], None]


@dataclass(frozen=True)
class Arguments:
    """The way in which a kernel's arguments come from the values that a launch brings.

    Attributes:
        arrange: puts a launch's values, with the fixed ones behind them, into the kernel's order.
        n_values: how many values a launch brings.
        fixed: values that are the same at every launch.
        device: the index of the device, which is the current one at every launch.
    """

    arrange: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    n_values: int
    fixed: tuple[Any, ...]
    device: int


# The stream that torch's operators on a device (by its index) are queued on, as the number that CUDA knows it by.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: int(torch.cuda.current_stream(device).cuda_stream)
)

# The parameters of a compiled kernel's launcher, in Triton 3.6 and from 3.7 on. Both are called alike; the launcher of
# 3.6 passes every argument after `function` on to its C function.
_GRID = ("self", "gridX", "gridY", "gridZ", "stream", "function")
_DECLARED_36 = (*_GRID, "args")
_DECLARED_37 = (*_GRID, "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args")
DECLARED = (_DECLARED_36, _DECLARED_37)


def bind(compiled: Any, arguments: Arguments) -> Launch | None:
    """Return a launch of a compiled kernel on the current stream; None if only the public launch can serve."""
    try:
        return _bind(compiled, arguments)
    except (AttributeError, TypeError, ValueError) as error:
        _say_once(logging.WARNING, _UNKNOWN, f"{type(error).__name__}: {error}")
        return None


def _bind(compiled: Any, arguments: Arguments) -> Launch:
    launcher = compiled.run
    if isinstance(launcher, functools.partial):
        # Triton leaves a partial there if a kernel cannot be loaded; the call raises the reason.
        launcher()
    takes = declared(type(launcher))
    if takes not in DECLARED:
        raise TypeError(f"it takes {', '.join(takes)}")
    observed = _observed(compiled, arguments)
    if type(launcher).__name__ != "CudaLauncher" or _needs_more(launcher):
        unobserved = (compiled.function, compiled.packed_metadata, None, None, None)
        return _quick(launcher, unobserved, arguments, observed)
    native = prepare(compiled, arguments, observed)
    if native is not None:
        return native
    # The arguments that the launcher would pass on, without scratch memory and hooks.
    head = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    if takes == _DECLARED_36:
        middle = (*head, None, None, compiled.packed_metadata, None, None, None)
        return _quick(launcher.launch, middle, arguments, observed)
    tail = (None, None, None, None, None, launcher.arg_annotations, launcher.kernel_signature)
    # The C function of this launcher takes a tuple of the arguments.
    packed = replace(arguments, arrange=lambda values: (arguments.arrange(values),))
    return _quick(launcher.launch, (*head, compiled.packed_metadata, *tail), packed, observed)


def declared(launcher: type) -> tuple[str, ...]:
    """Return the parameters of launchers of a class."""
    return tuple(inspect.signature(launcher.__call__).parameters)


def _needs_more(launcher: Any) -> bool:
    """Return True if a launch is more than one call of its C function, to allocate scratch memory or to trace."""
    return bool(
        launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False)
    )


def _quick(call: Callable[..., None], middle: tuple[Any, ...], arguments: Arguments, observed: Launch) -> Launch:
    """Return a launch that calls a function of Triton's with values in `middle`, and `observed` if there is a hook."""
    hooks, enter, leave = _hooks()
    arrange, fixed, device = arguments.arrange, arguments.fixed, arguments.device

    def launch(grid: Grid, values: tuple[Any, ...]) -> None:
        if hooks.launch_enter_hook is enter and hooks.launch_exit_hook is leave and not enter.calls and not leave.calls:
            call(*grid, current_stream(device), *middle, *arrange(values + fixed))
        else:
            observed(grid, values)

    return launch


def _observed(compiled: Any, arguments: Arguments) -> Launch:
    """Return a launch that ends as Triton's public launch does, with profilers' hooks."""
    hooks, _, _ = _hooks()

    def launch(grid: Grid, values: tuple[Any, ...]) -> None:
        stream, taken = current_stream(arguments.device), arguments.arrange(values + arguments.fixed)
        about = compiled.launch_metadata(grid, stream, *taken)
        hooked = (about, hooks.launch_enter_hook, hooks.launch_exit_hook)
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, *hooked, *taken)

    return launch


def _hooks() -> tuple[Any, Any, Any]:
    """Return Triton's settings that hold profilers' hooks, and its two chains, which a user may replace."""
    import triton

    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    if not (isinstance(enter.calls, list) and isinstance(leave.calls, list)):
        raise TypeError("its hooks are no chains")
    return hooks, enter, leave


# Words on the launches that are left to Triton, about the reason.
_UNKNOWN = (
    "Triton's launcher is not one that normforge knows (%s); kernels are launched through Triton's public interface, "
    "which takes some 15 us longer each time"
)
_NOT_NATIVE = "kernels are launched by Triton's launcher, and not by the faster one of normforge (%s)"
_NOT_BUILT = "known calls are found in Python, and not in C, and kernels are launched by Triton's launcher (%s)"


@functools.cache
def _say_once(level: int, text: str, why: str) -> None:
    logger.log(level, text, why)


NAME = "normforge_native"
# Triton finds and loads the library before there is a kernel to launch.
LIBRARY = "libcuda.so.1"

# Prefixes of the Triton releases whose way of passing parameters to kernels is known.
_RELEASES = ("3.6.", "3.7.")
_KINDS = {"i32": "i", "i64": "l", "fp32": "f"}

_lock = fork_safe(threading.Lock())
# The compiled `native.c`; False if it cannot be had.
_module: Any = None


@dataclass(frozen=True)
class Slot:
    """A value that each launch brings; `place` is its index among these values."""

    place: int


def prepare(compiled: Any, arguments: Arguments, observed: Launch) -> Launch | None:
    """Return a launch of a compiled CUDA kernel without Triton's launcher; None if only Triton's can launch the kernel.

    Args:
        compiled: the kernel, loaded, without scratch memory.
        arguments: the kernel's arguments.
        observed: launches the kernel while there is a hook.

    Raises:
        SettingError: NORMFORGE_NATIVE_LAUNCHER or NORMFORGE_FROZEN is neither 0 nor 1.
    """
    module = library(build=not settings.frozen())
    if module is None:
        return None
    taken = arguments.arrange((*map(Slot, range(arguments.n_values)), *arguments.fixed))
    try:
        launch: Launch = module.Launch(
            driver=_driver(),
            n_values=arguments.n_values,
            device=arguments.device,
            current_stream=current_stream,
            hooks=_hooks(),
            observed=observed,
            **_about(compiled, taken),
        )
        return launch
    except Exception as error:
        # The launcher saves a microsecond or so, which no failure is worth.
        _say_once(logging.INFO, _NOT_NATIVE, f"{type(error).__name__}: {error}")
        return None


def _driver() -> tuple[int | None, ...]:
    """Return the addresses of the driver's functions, in the order of `Driver` of native.c."""
    names = "LaunchKernelEx", "GetErrorString", "CtxGetCurrent", "DeviceGet", "DevicePrimaryCtxRetain", "CtxSetCurrent"
    # ctypes opens the library once, and closes it never.
    return tuple([ctypes.cast(getattr(ctypes.CDLL(LIBRARY), f"cu{name}"), ctypes.c_void_p).value for name in names])


class _NotServedError(Exception):
    """The reason why a kernel, or a build of Python, keeps Triton's own launcher."""


def _about(compiled: Any, taken: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments that describe a kernel to the launcher."""
    import triton

    metadata = compiled.metadata
    if not triton.__version__.startswith(_RELEASES):
        raise _NotServedError(f"Triton {triton.__version__} is not known")
    warps, clusters, shared = compiled.packed_metadata
    if metadata.target.backend != "cuda" or clusters != 1:
        raise _NotServedError(f"a kernel for {metadata.target.backend} in clusters of {clusters}")
    signature = compiled.src.signature.values()
    parameters = [each for kind, source in zip(signature, taken, strict=True) for each in _parameters(kind, source)]
    return {
        "function": compiled.function,
        # 32 of a warp.
        "threads": warps * 32,
        "shared": shared,
        "pdl": metadata.launch_pdl,
        "cooperative": metadata.launch_cooperative_grid,
        "parameters": tuple(parameters),
    }


def _parameters(kind: Any, source: Any) -> Iterator[tuple[str, int, Any]]:
    """Yield the parameters for an argument of a Triton type: none for a constant, those of all items for a tuple."""
    if isinstance(kind, tuple):
        for inner, part in zip(kind, source, strict=True):
            yield from _parameters(inner, part)
    elif kind != "constexpr":
        letter = "p" if kind.startswith("*") else _KINDS[kind]
        yield (letter, source.place, None) if isinstance(source, Slot) else (letter, -1, source)


def library(*, build: bool) -> Any:
    """Return the compiled `native.c`, from Triton's cache or else compiled into it; None if it cannot be had.

    Args:
        build: whether it may be compiled.
    """
    global _module
    if not settings.native_launcher():
        return None
    with _lock:
        if _module is None:
            try:
                _module = load(build=build)
            except Exception as error:
                # C saves a microsecond or two, which no failure is worth. Each further try would fail too.
                _module = False
                _say_once(logging.INFO, _NOT_BUILT, f"{type(error).__name__}: {error}")
        return _module or None


def load(*, build: bool) -> Any:
    """Return the compiled `native.c`; None if it is not in Triton's cache and compiling is not allowed."""
    from triton.backends.nvidia import driver
    from triton.runtime.build import compile_module_from_src

    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise _NotServedError("it takes Python's lock")
    # Triton's cache knows the library by its source.
    source = Path(__file__).with_name("native.c").read_text()
    kept = _kept(source)
    if kept is None and not build:
        return None
    # Triton loads any file in its cache, whoever wrote the file.
    why = None if kept is None else settings.why_open(kept, owned=3)
    if why is not None:
        raise _NotServedError(f"{why}, and Triton's cache has machine code there")
    return compile_module_from_src(source, NAME, include_dirs=[str(Path(driver.__file__).parent / "include")])


def _kept(source: str) -> Path | None:
    """Return the file of Triton's cache under the key that Triton gives the source; None if there is no such file."""
    from triton.runtime.build import platform_key
    from triton.runtime.cache import get_cache_manager

    key = hashlib.sha256((source + platform_key()).encode()).hexdigest()
    path = get_cache_manager(key).get_file(f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}")
    return None if path is None else Path(path)
