"""Whether kernels can run on a device, and how one is launched there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from ..codegen.tiling import WARP
from ..errors import DeviceError

_CPU = (
    "x is on {device} and generated kernels run on a GPU; move the tensors to one, "
    "or set TRITON_INTERPRET=1 before the program starts to run them in Triton's (slow) CPU interpreter"
)


# The interpreter rewrites triton.language for the time of a launch, and holds the program's place in the grid in a
# global: of four threads' calls, one in twenty-five failed, and one in a hundred was wrong.
_one_interpreted_launch = threading.Lock()


def require_device(x: torch.Tensor) -> None:
    """Refuse a tensor that no kernel can read.

    Raises:
        DeviceError: x is not on a GPU, and the interpreter is off.
    """
    if not (x.is_cuda or interpreting()):
        raise DeviceError(_CPU.format(device=x.device))


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


# The index of the current device, without asking each time whether CUDA was started.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which a device is the current one."""
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        return torch.cuda.device(device)
    return nullcontext()
