"""Whole programs on a machine without a GPU: tensors are on the CPU, and kernels those of an H200, which none runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from normforge.ahead_of_time import compile_keys, warmup
from normforge.calls import backend, first, plan, road
from normforge.families.group import row as group
from normforge.kernels.gpu import named_target
from normforge.tools import driver

from .stand_in_driver import Driver, driving


@contextmanager
def on_an_h200() -> Iterator[Driver]:
    """Have calls on the CPU choose, compile or load, and launch the kernels of an H200, by the stand-in for its driver.

    Launches write nothing: what calls return is whatever memory held.
    """
    target = named_target("sm_90")
    with ExitStack() as patches:

        def put(place: object, name: str, value: object) -> None:
            patches.enter_context(mock.patch.object(place, name, return_value=value))

        for module in (plan, compile_keys, warmup):
            put(module, "target_of", target)
        for module in (first, group, road):
            put(module, "require_device", None)
        for module in (compile_keys, warmup):
            put(module, "gpu", torch.device("cpu"))
        put(backend, "_interpreting", True)
        put(driver, "is_missing", False)
        yield patches.enter_context(driving())
