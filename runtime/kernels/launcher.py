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
from .assembly import Recipe
from .gpu import Target, interpreting, on_device
from .obtain import obtain
from .strides import RowWalk


class Launcher:
    """A kernel of which everything is known but the values of some arguments, its slots.

    Attributes:
        kernel: the `triton.JITFunction`.
        key: the compilation that it launches.
        launch: launches the compiled kernel on the device's current stream, given a grid and the slots' values with
            pointers as addresses; None where kernels take tensors.
    """

    def __init__(self, kernel: Any, recipe: Recipe, target: Target, device: torch.device | None) -> None:
        """Compile a kernel for a device, if kernels are compiled there.

        Args:
            kernel: a `triton.JITFunction`, which names some of the recipe's types, strides and constants.
            recipe: what it is compiled from.
            target: the GPU that it is for.
            device: where it runs; None if nowhere, and then it is only known what would be compiled.
        """
        self.kernel = kernel
        self._device = device
        strides = recipe.strides.values()
        walked = [stride.arguments if isinstance(stride, RowWalk) else stride for stride in strides]
        self._fixed = (*walked, *recipe.constants.values())
        names = (*recipe.types, *recipe.strides, *recipe.constants)
        # One call in C puts a launch's values into the kernel's order.
        self._arrange: Callable[[tuple[Any, ...]], tuple[Any, ...]] = itemgetter(*map(names.index, kernel.arg_names))
        self.key = recipe.key(f"{kernel.fn.__module__}:{kernel.fn.__name__}", kernel.arg_names, target)
        self._compiled: Any = None
        self.launch: triton_launcher.Launch | None = None
        if device is not None and target.compiles:
            with on_device(device):
                self._compiled = obtain(self.key, kernel, target, device.index)
                arguments = triton_launcher.Arguments(self._arrange, len(recipe.types), self._fixed, device.index)
                launch = triton_launcher.bind(self._compiled, arguments)
            # With one device there is no other that could be the current one.
            self.launch = launch if launch is None or torch.cuda.device_count() == 1 else _guarded(launch, device)

    def launch_tensors(self, grid: Grid, values: tuple[Any, ...]) -> None:
        """Launch through Triton's public interface, which takes longer; pointers are tensors here."""
        assert self._device is not None
        arguments = self._arrange(values + self._fixed)
        if self._compiled is None:
            run_public(self.kernel, grid, arguments, dict(self.key.options))
        else:
            with on_device(self._device):
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
        options: num_warps, and further options of the compiler.

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
