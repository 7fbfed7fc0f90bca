"""The presence of a GPU, as far as it is known without torch, whose import takes seconds."""

from __future__ import annotations

import argparse
from ctypes import CDLL
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DeviceError

if TYPE_CHECKING:
    from .tune_options import Request

NO_GPU_TO_TIME = "no GPU was found, and times are compared on one; run it on a machine with a GPU"
_NO_GPU_TO_COMPILE_FOR = (
    "no GPU was found to compile for; name an architecture instead: normforge aot --arch sm_90 ..., whose folder the "
    "machine with the GPU loads"
)
# ROCm's driver, and the driver of WSL.
_DEVICES = ("/dev/kfd", "/dev/dxg")


def is_missing() -> bool:
    """Return True if there is no driver of any GPU, so that torch would find none."""
    if any(Path(device).exists() for device in _DEVICES):
        return False
    try:
        CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


def check_tune(_: Request) -> None:
    """Raise DeviceError if `normforge tune` has no GPU to measure."""
    if is_missing():
        raise DeviceError(NO_GPU_TO_TIME)


def check_warmup(args: argparse.Namespace) -> None:
    """Raise DeviceError if `normforge warmup` has no GPU to compile for, and none was named."""
    if args.target is None and is_missing():
        raise DeviceError(_NO_GPU_TO_COMPILE_FOR)
