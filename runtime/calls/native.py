"""Known calls of the functional API in C, where it can be had: `upstream/known_calls.c`.

It is optional, as the launcher in C is, and switched off with that: the functions of `straight.py` and `launch.py` do
the same in Python, and are handed every call that C does not serve.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import settings
from ..codegen.parameters import FORWARD
from ..selection import dispatch
from ..upstream import native_launcher
from ..upstream.torch_internals import dispatch_modes
from . import launch
from .argument_checks import LARGEST_FP32
from .known import MISALIGNED, UNREADABLE, Found
from .straight import DEFAULT_EPS, find_recorded

logger = logging.getLogger("normforge")

NAME = "normforge_known_calls"
SOURCE = Path(native_launcher.__file__).with_name("known_calls.c")


class InPython:
    """The functions themselves. `Calls` of `known_calls.c` has the same methods, but no key of what it finds."""

    find_recorded = staticmethod(find_recorded)

    @staticmethod
    def run_alone(found: Found) -> torch.Tensor:
        """Launch a call that was found, and return y."""
        return launch.run_alone(*found)

    @staticmethod
    def run_added(found: Found) -> tuple[torch.Tensor, Any]:
        """Return y and the sum."""
        y, total, *_ = launch.run(*found)
        return y, total

    @staticmethod
    def run_recorded_alone(found: Found) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y and the statistics."""
        return launch.run_recorded_alone(*found)

    @staticmethod
    def run_recorded_added(found: Found) -> tuple[torch.Tensor, Any, Any]:
        """Return y, the sum and the statistics."""
        y, total, _, _, statistics = launch.run_recorded(*found)
        return y, total, statistics


calls = InPython()


@cache
def start() -> None:
    """Have `calls` be in C from now on, if that can be had.

    Raises:
        SettingError: NORMFORGE_NATIVE_LAUNCHER or NORMFORGE_FROZEN is neither 0 nor 1.
    """
    global calls
    calls = calls_among(dispatch)


def calls_among(plans: Any) -> InPython:
    """What finds calls among the `plans` of some object."""
    module = library(build=not settings.frozen())
    return InPython() if module is None else _in_c(module, plans)


def library(*, build: bool) -> Any:
    """The compiled `known_calls.c`, from Triton's cache or else compiled into it; None where it cannot be had.

    Args:
        build: whether it may be compiled.
    """
    if not settings.native_launcher():
        return None
    try:
        return native_launcher.load(SOURCE, NAME, build)
    except Exception as error:
        # It saves a microsecond or two, and nothing may fail for that.
        logger.info("known calls are found in Python, and not in C (%s: %s)", type(error).__name__, error)
        return None


def _in_c(module: Any, plans: Any) -> InPython:
    names = [row.name for row in FORWARD.inputs]
    calls: InPython = module.Calls(
        otherwise=InPython(),
        places=tuple(names.index(row.name) for row in FORWARD.parameters if row.functional and row.kind.is_tensor),
        width=len(names),
        dispatch=plans,
        forward_ad=forward_ad,
        is_grad_enabled=torch.is_grad_enabled,
        dispatch_modes=dispatch_modes,
        default_eps=DEFAULT_EPS,
        unreadable=UNREADABLE,
        misaligned=MISALIGNED,
        packed_dtype=torch.float32,
        largest=LARGEST_FP32,
    )
    return calls
