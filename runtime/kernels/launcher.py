"""A kernel made ready for launches that differ only in addresses, M and plain numbers."""

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
from .assembly import Recipe
from .gpu import Target, on_device
from .obtain import obtain
from .strides import RowWalk


class Launcher:
    """A kernel with all arguments fixed except the slots, whose values each launch brings.

    Attributes:
        kernel: the `triton.JITFunction`.
        key: the compilation to launch.
        launch: a function of a grid and the slots' values, with pointers as addresses, that launches the compiled
            kernel on the device's current stream; None where kernels take tensors.
    """

    def __init__(self, kernel: Any, recipe: Recipe, target: Target, device: torch.device | None) -> None:
        """Compile a kernel for a device, if kernels are compiled for the device.

        Args:
            kernel: a `triton.JITFunction`, whose parameters are some of the recipe's types, strides and constants.
            recipe: the recipe of the kernel.
            target: the GPU that the kernel is for.
            device: the device that runs the kernel; None means that only `key` is computed.
        """
        self.kernel = kernel
        self._device = device
        walked = [stride.arguments if isinstance(stride, RowWalk) else stride for stride in recipe.strides.values()]
        self._fixed = (*walked, *recipe.constants.values())
        names = (*recipe.types, *recipe.strides, *recipe.constants)
        # One call in C puts the values of a launch into the order of the kernel's parameters.
        self._arrange: Callable[[tuple[Any, ...]], tuple[Any, ...]] = itemgetter(*map(names.index, kernel.arg_names))
        self.key = recipe.key(f"{kernel.fn.__module__}:{kernel.fn.__name__}", kernel.arg_names, target)
        self._compiled: Any = None
        self.launch: triton_launcher.Launch | None = None
        if device is not None and target.compiles:
            with on_device(device):
                self._compiled = obtain(self.key, kernel, target, device.index)
                arguments = triton_launcher.Arguments(self._arrange, len(recipe.types), self._fixed, device.index)
                launch = triton_launcher.bind(self._compiled, arguments)
            # A single device is always the current device.
            self.launch = launch if launch is None or torch.cuda.device_count() == 1 else _guarded(launch, device)

    def launch_tensors(self, grid: Grid, values: tuple[Any, ...]) -> None:
        """Launch through Triton's public interface, which is slower; pointers are passed as tensors."""
        assert self._device is not None
        arguments = self._arrange(values + self._fixed)
        if self._compiled is None:
            interpret(self.kernel, grid, arguments, dict(self.key.options))
        else:
            with on_device(self._device):
                # The compiled kernel, because its source would be looked up or compiled once more.
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


# The interpreter patches triton.language during a launch, and keeps the program's place in the grid in a global. With
# four threads, one call in twenty-five failed, and one in a hundred was wrong.
_one_interpreted_launch = fork_safe(threading.Lock())


def interpret(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Launch a kernel in Triton's interpreter.

    Args:
        kernel: a `triton.JITFunction`.
        grid: programs in each dimension.
        arguments: the kernel's arguments, in order.
        options: num_warps, and further options of the compiler.

    Raises:
        DeviceError: tensors are on the CPU, and the interpreter was turned on too late.
    """
    if not _is_interpreted(kernel):
        raise DeviceError("TRITON_INTERPRET=1 was set after triton was imported; set it before the program starts")
    with _one_interpreted_launch:
        kernel[grid](*arguments, **options)


@cache
def _is_interpreted(kernel: Any) -> bool:
    from triton import language

    # Triton reads the variable twice: when its own library is imported, and when a kernel is.
    return all(hasattr(function, "rewrite") for function in (kernel, language.sum))


def new_exchange(empty: Empty, count: int) -> torch.Tensor:
    """Return memory for programs to exchange values through, filled with -1, which no program writes."""
    return empty((count,), (1,), torch.int64).fill_(-1)
