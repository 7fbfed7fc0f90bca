"""Whether kernels can run on a device, and how one is launched there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from .codegen.tiling import WARP
from .errors import DeviceError

_CPU = (
    "x is on {device} and generated kernels run on a GPU; move the tensors to one, "
    "or set TRITON_INTERPRET=1 before the program starts to run them in Triton's (slow) CPU interpreter"
)


def require_device(x: torch.Tensor) -> None:
    """Refuse a tensor that no kernel can read.

    Raises:
        DeviceError: x is not on a GPU, and the interpreter is off.
    """
    if not (x.is_cuda or interpreting()):
        raise DeviceError(_CPU.format(device=x.device))


def launch(kernel: Any, grid: tuple[int, ...], values: dict[str, object], warps: int, x: torch.Tensor) -> None:
    """Launch a kernel on x's device and the current stream.

    Args:
        kernel: a `triton.JITFunction`.
        grid: programs in each dimension.
        values: everything that the kernel may name as a parameter.
        warps: warps a program, of 32 threads.
        x: a tensor on the device.

    Raises:
        DeviceError: x is on the CPU, and the interpreter was turned on too late.
    """
    if not x.is_cuda and not _is_interpreted(kernel):
        raise DeviceError("TRITON_INTERPRET=1 was set after triton was imported; set it before the program starts")
    warps = scale_warps(warps, _warp_size(x.device) if x.is_cuda else WARP)
    with _on_device(x):
        kernel[grid](*[values[name] for name in kernel.arg_names], num_warps=warps)


def scale_warps(warps: int, warp_size: int) -> int:
    """How many warps of a target hold the threads that a tile's 32-wide warps stand for."""
    return max(1, warps * WARP // warp_size)


@cache
def interpreting() -> bool:
    """Whether Triton runs kernels in its CPU interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def _is_interpreted(kernel: Any) -> bool:
    from triton import language

    # Triton reads the variable twice: for its own library when it is imported, and for a kernel when that is.
    return all(hasattr(function, "rewrite") for function in (kernel, language.sum))


@cache
def _warp_size(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).warp_size)


def _on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    if x.is_cuda and torch.cuda.current_device() != x.device.index:
        return torch.cuda.device(x.device)
    return nullcontext()
