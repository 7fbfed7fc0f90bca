"""Known calls of the functional API in C, where it can be had: `upstream/known_calls.c`.

It is optional, as the launcher in C is, and switched off with that: the functions of `straight.py` and `launch.py` do
the same in Python, and are handed every call that C does not serve.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import settings
from ..codegen.parameters import BACKWARD, FORWARD
from ..selection import dispatch
from ..upstream import native_launcher
from ..upstream.torch_dynamo import eager_only
from ..upstream.torch_internals import dispatch_modes
from . import launch
from .argument_checks import LARGEST_FP32
from .known import MISALIGNED, PLAIN, UNREADABLE, Found
from .outputs import rstd_address
from .straight import DEFAULT_EPS, Operands, Options, find_gradients, find_recorded

logger = logging.getLogger("normforge")

NAME = "normforge_known_calls"
SOURCES = tuple(
    Path(native_launcher.__file__).with_name(f"known_{part}.c") for part in ("calls", "gradients", "module")
)


# Records a call: given (options, what was found, None) and its operands, it returns what the call does.
Apply = Callable[..., Any]


class InPython:
    """The functions themselves. `Calls` of `known_calls.c` has `normalise`, and those of what is recorded."""

    def __init__(self, apply: Apply, apply_add: Apply) -> None:
        """Take what records a call without a residual, and what does with one."""
        self.apply, self.apply_add = apply, apply_add

    @eager_only
    def normalise(self, operands: Operands, options: Options, normalized_shape: Sequence[int] | None) -> Any:
        """What `recorded.normalise` returns of arguments like those of a call before; None where there was none.

        Arguments need no check before: a call that it would copy or refuse something of is like none. A
        normalized_shape of None is x's last dimension where there is a residual, and is refused elsewhere.
        """
        x, weight, bias, residual, x_bias = operands
        # A proxy of torch.fx records whatever it is asked.
        if x.__class__ not in PLAIN or (normalized_shape is None and residual is None):
            return None
        _, records, found = find_recorded(operands, options, normalized_shape)
        if found is None:
            return None
        told = (options, found, None)
        if residual is not None:
            return self.apply_add(told, *operands) if records else self.run_added(found)
        if not records:
            return self.run_alone(found)
        # Each None that is passed takes autograd some 0.1 us.
        if x_bias is not None:
            return self.apply(told, x, weight, bias, x_bias)
        return self.apply(told, x, weight) if bias is None else self.apply(told, x, weight, bias)

    gradients = staticmethod(find_gradients)

    @staticmethod
    def run_alone(found: Found) -> torch.Tensor:
        """Launch a call that was found, and return y."""
        y: torch.Tensor = launch.run(*found).y
        return y

    @staticmethod
    def run_added(found: Found) -> tuple[torch.Tensor, Any]:
        """Return y and the sum."""
        y, total, *_ = launch.run(*found)
        return y, total

    @staticmethod
    def run_recorded_alone(found: Found) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y and the statistics."""
        y, _, _, _, statistics = launch.run_recorded(*found)
        assert statistics is not None
        return y, statistics

    @staticmethod
    def run_recorded_added(found: Found) -> tuple[torch.Tensor, Any, Any]:
        """Return y, the sum and the statistics."""
        y, total, _, _, statistics = launch.run_recorded(*found)
        return y, total, statistics


# Of `recorded`, whose functions these take.
calls: InPython


def begin(apply: Apply, apply_add: Apply) -> None:
    """Have `calls` be in Python, with what records them."""
    global calls
    calls = InPython(apply, apply_add)


@cache
def start() -> None:
    """Have `calls` be in C from now on, if that can be had.

    Raises:
        SettingError: NORMFORGE_NATIVE_LAUNCHER or NORMFORGE_FROZEN is neither 0 nor 1.
    """
    global calls
    calls = calls_among(dispatch, calls)


def calls_among(plans: Any, otherwise: InPython) -> InPython:
    """What finds calls among the `plans` of some object, in C if that can be had; else what is there in Python."""
    module = library(build=not settings.frozen())
    return otherwise if module is None else _in_c(module, plans, otherwise)


def library(*, build: bool) -> Any:
    """What is compiled of `SOURCES`, from Triton's cache or else compiled into it; None where it cannot be had.

    Args:
        build: whether it may be compiled.
    """
    if not settings.native_launcher():
        return None
    try:
        return native_launcher.load(SOURCES, NAME, build)
    except Exception as error:
        # It saves a microsecond or two, and nothing may fail for that.
        logger.info("known calls are found in Python, and not in C (%s: %s)", type(error).__name__, error)
        return None


def _in_c(module: Any, plans: Any, otherwise: InPython) -> InPython:
    names, arriving = ([row.name for row in family.inputs] for family in (FORWARD, BACKWARD))
    calls: InPython = module.Calls(
        otherwise=otherwise,
        places=tuple(names.index(row.name) for row in FORWARD.parameters if row.functional and row.kind.is_tensor),
        width=len(names),
        apply=otherwise.apply,
        apply_add=otherwise.apply_add,
        plain=PLAIN,
        dispatch=plans,
        forward_ad=forward_ad,
        is_grad_enabled=torch.is_grad_enabled,
        dispatch_modes=dispatch_modes,
        default_eps=DEFAULT_EPS,
        unreadable=UNREADABLE,
        misaligned=MISALIGNED,
        packed_dtype=torch.float32,
        gradient_places=tuple(
            arriving.index(row.name) for row in BACKWARD.parameters if row.functional and row.kind.is_tensor
        ),
        gradient_width=len(arriving),
        mean_place=arriving.index("mean"),
        rstd_address=rstd_address,
        largest=LARGEST_FP32,
    )
    return calls
