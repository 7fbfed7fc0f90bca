"""A kernel made ready for launches that differ in nothing but addresses, M and plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch

from . import direct
from .compiled import KernelKey, integer_type, obtain
from .direct import Grid
from .kernels import compiles_for, on_device, run_public, scale_warps, warp_size


class Launcher:
    """A kernel of which everything is known but the values of some arguments, its slots.

    Attributes:
        key: the compilation that it launches.
        launch: launches the compiled kernel on the device's current stream, given a grid and the slots' values with
            pointers as addresses; None where kernels take tensors.
    """

    def __init__(
        self,
        kernel: Any,
        types: Mapping[str, str | None],
        integers: Mapping[str, int],
        constants: Mapping[str, int],
        warps: int,
        options: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        """Compile a kernel for a device, if kernels are compiled there.

        Args:
            kernel: a `triton.JITFunction`. It names some of the arguments that follow.
            types: the slots, in the order in which a launch brings them, with their types in Triton's words; None for
                an absent pointer.
            integers: arguments that are the same at every launch: row strides.
            constants: compile-time constants.
            warps: warps a program, of 32 threads.
            options: what else the compiler is told.
            device: where it runs.
        """
        self._kernel = kernel
        self._device = device
        self._fixed = (*integers.values(), *constants.values())
        names = (*types, *integers, *constants)
        # One call in C puts a launch's values into the kernel's order.
        self._arrange: Callable[[tuple[Any, ...]], tuple[Any, ...]] = itemgetter(*map(names.index, kernel.arg_names))
        self._options = {"num_warps": scale_warps(warps, warp_size(device)), **options}
        words: dict[str, str | int | None] = {name: integer_type(value) for name, value in integers.items()}
        words |= {**types, **constants}
        self.key = KernelKey(
            f"{kernel.fn.__module__}:{kernel.fn.__name__}",
            tuple((name, words[name]) for name in kernel.arg_names),
            tuple(self._options.items()),
        )
        self.launch = _launch(self.key, kernel, direct.Arguments(self._arrange, self._fixed, device.index), device)

    def launch_tensors(self, grid: Grid, values: tuple[Any, ...]) -> None:
        """Launch through Triton's public interface, which takes longer; pointers are tensors here."""
        with on_device(self._device):
            run_public(self._kernel, grid, self._arrange(values + self._fixed), self._options)


def _launch(key: KernelKey, kernel: Any, arguments: direct.Arguments, device: torch.device) -> direct.Launch | None:
    if not compiles_for(device):
        return None
    with on_device(device):
        launch = direct.bind(obtain(key, kernel, device.index), arguments)
    # With one device there is no other that could be the current one.
    return launch if launch is None or torch.cuda.device_count() == 1 else _guarded(launch, device)


def _guarded(launch: direct.Launch, device: torch.device) -> direct.Launch:
    def guarded(grid: Grid, values: tuple[Any, ...]) -> None:
        with on_device(device):
            launch(grid, values)

    return guarded
