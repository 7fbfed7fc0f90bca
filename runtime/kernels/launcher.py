"""A kernel made ready for launches that differ in nothing but addresses, M and plain numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import torch

from ..errors import DeviceError
from ..locks import fork_safe
from ..upstream import triton_launcher
from ..upstream.dynamo_guards import Empty, current_device
from ..upstream.triton_launcher import Grid
from .assembly import key_of, options_of
from .gpu import Target, interpreting, on_device
from .obtain import obtain
from .strides import RowStride, RowWalk


class Launcher:
    """A kernel of which everything is known but the values of some arguments, its slots.

    Attributes:
        kernel: the `triton.JITFunction`.
        key: the compilation that it launches.
        launch: launches the compiled kernel on the device's current stream, given a grid and the slots' values with
            pointers as addresses; None where kernels take tensors.
    """

    def __init__(
        self,
        kernel: Any,
        types: Mapping[str, str | None],
        strides: Mapping[str, RowStride],
        constants: Mapping[str, int],
        warps: int,
        options: Mapping[str, Any],
        target: Target,
        device: torch.device | None,
    ) -> None:
        """Compile a kernel for a device, if kernels are compiled there.

        Args:
            kernel: a `triton.JITFunction`. It names some of the arguments that follow.
            types: the slots, in the order in which a launch brings them, with their types in Triton's words; None for
                an absent pointer.
            strides: arguments that are the same at every launch: row strides. Several of one tensor are one tuple.
            constants: compile-time constants.
            warps: warps a program, of 32 threads.
            options: what else the compiler is told.
            target: the GPU that it is for.
            device: where it runs; None if nowhere, and then it is only known what would be compiled.
        """
        self.kernel = kernel
        self._device = device
        walked = [stride.arguments if isinstance(stride, RowWalk) else stride for stride in strides.values()]
        self._fixed = (*walked, *constants.values())
        names = (*types, *strides, *constants)
        # One call in C puts a launch's values into the kernel's order.
        self._arrange: Callable[[tuple[Any, ...]], tuple[Any, ...]] = itemgetter(*map(names.index, kernel.arg_names))
        self._options = options_of(kernel.arg_names, constants, warps, options, target)
        name = f"{kernel.fn.__module__}:{kernel.fn.__name__}"
        self.key = key_of(name, kernel.arg_names, types, strides, constants, self._options)
        self._compiled: Any = None
        self.launch: triton_launcher.Launch | None = None
        if device is not None and target.compiles:
            with on_device(device):
                self._compiled = obtain(self.key, kernel, target, device.index)
                arguments = triton_launcher.Arguments(self._arrange, len(types), self._fixed, device.index)
                launch = triton_launcher.bind(self._compiled, arguments)
            # With one device there is no other that could be the current one.
            self.launch = launch if launch is None or torch.cuda.device_count() == 1 else _guarded(launch, device)

    def launch_tensors(self, grid: Grid, values: tuple[Any, ...]) -> None:
        """Launch through Triton's public interface, which takes longer; pointers are tensors here."""
        assert self._device is not None
        arguments = self._arrange(values + self._fixed)
        with on_device(self._device):
            if self._compiled is None:
                run_public(self.kernel, grid, arguments, self._options)
            else:
                # Of the kernel that was compiled, not of its source, which would be looked up or compiled once more.
                self._compiled[grid](*arguments)


def _guarded(launch: triton_launcher.Launch, device: torch.device) -> triton_launcher.Launch:
    index = device.index

    def guarded(grid: Grid, values: tuple[Any, ...]) -> None:
        if current_device() == index:
            launch(grid, values)
        else:
            with torch.cuda.device(device):
                launch(grid, values)

    return guarded


# The interpreter rewrites triton.language for the time of a launch, and holds the program's place in the grid in a
# global: of four threads' calls, one in twenty-five failed, and one in a hundred was wrong.
_one_interpreted_launch = fork_safe(threading.Lock())


def run_public(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Launch a kernel through Triton's public interface, on the current device and stream.

    Args:
        kernel: a `triton.JITFunction`.
        grid: programs in each dimension.
        arguments: what the kernel takes, in order.
        options: num_warps, and what else the compiler is told.

    Raises:
        DeviceError: tensors are on the CPU, and the interpreter was turned on too late.
    """
    if not interpreting():
        kernel[grid](*arguments, **options)
        return
    if not _is_interpreted(kernel):
        raise DeviceError("TRITON_INTERPRET=1 was set after triton was imported; set it before the program starts")
    with _one_interpreted_launch:
        kernel[grid](*arguments, **options)


@cache
def _is_interpreted(kernel: Any) -> bool:
    from triton import language

    # Triton reads the variable twice: for its own library when it is imported, and for a kernel when that is.
    return all(hasattr(function, "rewrite") for function in (kernel, language.sum))


def new_exchange(empty: Empty, count: int) -> torch.Tensor:
    """Memory for programs to exchange values through; -1 is what none leaves there."""
    return empty((count,), (1,), torch.int64).fill_(-1)
