"""Triton's own launcher, called without the work that `kernel[grid](...)` does again for every launch.

That work (each argument bound, specialised and hashed, two dictionary look-ups) takes 9 to 19 us of Python, and comes
to the same for every launch of a prepared call. This inner interface is private to Triton and changes between
releases, so it is used here alone, recognised by its signature, and not used if the signature is unknown.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import native_launcher
from .native_launcher import Slot

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
        _say_once(f"{type(error).__name__}: {error}")
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
    taken = arguments.arrange((*map(Slot, range(arguments.n_values)), *arguments.fixed))
    native: Launch | None = native_launcher.prepare(
        compiled, taken, arguments.n_values, arguments.device, current_stream, _hooks(), observed
    )
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


@functools.cache
def _say_once(why: str) -> None:
    logger.warning(
        "Triton's launcher is not one that normforge knows (%s); kernels are launched through Triton's public "
        "interface, which takes some 15 us longer each time",
        why,
    )
