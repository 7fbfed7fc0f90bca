"""The device that the command line's kernels run on: a GPU, or Triton's CPU interpreter."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

from ..errors import DeviceError
from .driver import NO_GPU_TO_TIME


@dataclass(frozen=True)
class Machine:
    """A device, its name for people, and whether kernels are interpreted there instead of compiled."""

    device: torch.device
    name: str
    interpreted: bool


def find_machine() -> Machine:
    """Return the GPU, or the interpreter if there is no GPU or TRITON_INTERPRET asks for the interpreter.

    The interpreter is announced on standard error, because its timings mean nothing.

    Raises:
        DeviceError: there is no GPU, and it is too late or forbidden to turn the interpreter on.
    """
    has_gpu = torch.cuda.is_available()
    if not has_gpu and "TRITON_INTERPRET" not in os.environ:
        # Triton decorates its own library when it is imported; the variable does nothing after that.
        if "triton" in sys.modules:
            raise DeviceError(
                "no GPU was found, and Triton was imported before its interpreter could be turned on; "
                "set TRITON_INTERPRET=1 in the environment and start again"
            )
        os.environ["TRITON_INTERPRET"] = "1"

    from triton import knobs

    if knobs.runtime.interpret:
        why = "TRITON_INTERPRET is set" if has_gpu else "no GPU was found"
        print(
            f"{why}: kernels run once each, in Triton's CPU interpreter, where time says nothing about a GPU",
            file=sys.stderr,
        )
        return Machine(torch.device("cpu"), "Triton's CPU interpreter", interpreted=True)
    if not has_gpu:
        raise DeviceError(
            f"no GPU was found, and TRITON_INTERPRET={os.environ['TRITON_INTERPRET']} turns Triton's CPU interpreter "
            "off; unset it or set it to 1"
        )
    return Machine(torch.device("cuda"), torch.cuda.get_device_name(), interpreted=False)


def find_gpu() -> Machine:
    """Return the GPU, for a command that compares times.

    Raises:
        DeviceError: there is no GPU, or TRITON_INTERPRET asks for the interpreter.
    """
    if not torch.cuda.is_available():
        raise DeviceError(NO_GPU_TO_TIME)
    machine = find_machine()
    if machine.interpreted:
        raise DeviceError("Triton's CPU interpreter has no times to compare; unset TRITON_INTERPRET")
    return machine
