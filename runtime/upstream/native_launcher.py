"""A launcher in C beside Triton's own, which takes a launch's values unchanged and prepares the rest once.

`launcher.c` is compiled once per machine, as Triton compiles its own launcher and into the same cache. The launcher is
optional: if it cannot be compiled, or does not know a kernel, launches go through Triton's launcher.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import sysconfig
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import settings
from ..locks import fork_safe
from ..settings import why_open

logger = logging.getLogger("normforge")

NAME = "normforge_launcher"
SOURCE = Path(__file__).with_name("launcher.c")
# Triton finds and loads the library before there is a kernel to launch.
LIBRARY = "libcuda.so.1"

# Prefixes of the Triton releases whose way of passing parameters to kernels is known.
_RELEASES = ("3.6.", "3.7.")
_KINDS = {"i32": "i", "i64": "l", "fp32": "f"}

_lock = fork_safe(threading.Lock())
# The compiled `launcher.c`; False if it cannot be had.
_module: Any = None


@dataclass(frozen=True)
class Slot:
    """A value that each launch brings; `place` is its index among these values."""

    place: int


def prepare(
    compiled: Any,
    taken: tuple[Any, ...],
    n_values: int,
    device: int,
    current_stream: Callable[[int], int],
    hooks: tuple[Any, Any, Any],
    observed: Callable[..., None],
) -> Any:
    """Return a launch of a compiled CUDA kernel without Triton's launcher; None if only Triton's can launch the kernel.

    Args:
        compiled: the kernel, loaded, without scratch memory.
        taken: its arguments in order, fixed values and slots.
        n_values: how many values a launch brings.
        device: the index of its device.
        current_stream: a function from that index to the stream that launches go to.
        hooks: the settings that hold profilers' hooks, and the two chains there.
        observed: launches the kernel while there is a hook.

    Raises:
        SettingError: NORMFORGE_NATIVE_LAUNCHER or NORMFORGE_FROZEN is neither 0 nor 1.
    """
    module = library(build=not settings.frozen())
    if module is None:
        return None
    try:
        return module.Launch(
            driver=_driver(),
            n_values=n_values,
            device=device,
            current_stream=current_stream,
            hooks=hooks,
            observed=observed,
            **_about(compiled, taken),
        )
    except Exception as error:
        # The launcher saves a microsecond or so, which no failure is worth.
        _say_once(f"{type(error).__name__}: {error}")
        return None


def _driver() -> tuple[int | None, ...]:
    """Return the addresses of the driver's functions, in the order of `Driver` of launcher.c."""
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
    """Return the compiled `launcher.c`, from Triton's cache or else compiled into it; None if it cannot be had.

    Args:
        build: whether it may be compiled.
    """
    global _module
    if not settings.native_launcher():
        return None
    with _lock:
        if _module is None:
            try:
                _module = load(SOURCE, NAME, build)
            except Exception as error:
                # Without a compiler, for example, each further kernel would fail too.
                _module = False
                _say_once(f"{type(error).__name__}: {error}")
        return _module or None


def load(path: Path, name: str, build: bool) -> Any:
    """Return an extension module in C, from Triton's cache or compiled into it; None if compiling is not allowed.

    Args:
        path: its source, whose text Triton's cache knows it by.
        name: the module's.
        build: whether it may be compiled.
    """
    from triton.backends.nvidia import driver
    from triton.runtime.build import compile_module_from_src

    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise _NotServedError("it takes Python's lock")
    source = path.read_text()
    kept = _kept(source, name)
    if kept is None and not build:
        return None
    # Triton loads any file in its cache, whoever wrote the file.
    why = None if kept is None else why_open(kept, owned=3)
    if why is not None:
        raise _NotServedError(f"{why}, and Triton's cache has machine code there")
    return compile_module_from_src(source, name, include_dirs=[str(Path(driver.__file__).parent / "include")])


def _kept(source: str, name: str) -> Path | None:
    """Return the file of Triton's cache under the key that Triton gives the source; None if there is no such file."""
    from triton.runtime.build import platform_key
    from triton.runtime.cache import get_cache_manager

    key = hashlib.sha256((source + platform_key()).encode()).hexdigest()
    path = get_cache_manager(key).get_file(f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}")
    return None if path is None else Path(path)


@functools.cache
def _say_once(why: str) -> None:
    logger.info("kernels are launched by Triton's launcher, and not by the faster one of normforge (%s)", why)
