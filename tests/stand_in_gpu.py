"""Whole programs on a machine without a GPU: tensors are on the CPU, and kernels those of an H200, which none runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from normforge.calls import backend, first, group, group_plan, neighbours, plan, row_gradients
from normforge.kernels import gpu
from normforge.kernels.gpu import named_target

from .stand_in_driver import Driver, driving


@contextmanager
def on_an_h200() -> Iterator[Driver]:
    """Have calls on the CPU choose, compile or load, and launch the kernels of an H200, by the stand-in for its driver.

    Launches write nothing: what calls return is whatever memory held.
    """
    target = named_target("sm_90")
    with ExitStack() as patches:
        for module in (gpu, plan, row_gradients, group_plan):
            patches.enter_context(mock.patch.object(module, "target_of", return_value=target))
        for module in (first, group, neighbours):
            patches.enter_context(mock.patch.object(module, "require_device"))
        patches.enter_context(mock.patch.object(backend, "_interpreting", return_value=True))
        yield patches.enter_context(driving())
