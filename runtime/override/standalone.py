"""Torch's own norms as plain functions, outside torch's dispatcher, as BackendBench calls them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..errors import DeviceError
from ..upstream.torch_dispatcher import kernel_of
from .served import serving

# The dispatch keys of the devices that kernels run on.
_KEYS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def standalone(operator: str) -> Callable[..., Any]:
    """Return an operator of aten as a function, run by our kernel where one serves; results have no gradients.

    Torch's kernels are looked up now, so that the function may replace the operator itself afterwards.

    Args:
        operator: one of `served.OPERATORS`.

    Returns:
        A function of the operator's arguments, in the order of its schema. It raises a DeviceError for tensors on a
        device that torch has no kernel of the operator for.
    """
    serves = {}
    for key in _KEYS:
        if (kernel := kernel_of(operator, key.name)) is not None:
            serves[key.name.lower()] = partial(serving(operator, kernel), torch._C.DispatchKeySet(key))

    def call(x: torch.Tensor, *others: Any) -> Any:
        serve = serves.get(x.device.type)
        if serve is None:
            raise DeviceError(
                f"aten::{operator} was given a tensor on {x.device}; this torch has kernels of it for "
                f"{' and '.join(serves)}: move the tensor there"
            )
        return serve(x, *others)

    return call
