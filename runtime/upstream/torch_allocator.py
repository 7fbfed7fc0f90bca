"""Tensors without values, made the shortest way there is: outputs, and memory that kernels work in.

`torch.empty` and `new_empty` take 1.8 us on the host of an H200, most of it in torch's dispatcher; what the code that
torch.compile writes allocates with takes 1.0. That is torch's own business and may change, so it is used here alone,
tried before it is trusted, and done without where it is missing or does something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from ..errors import TransformError
from .torch_internals import transforming

# From sizes, strides and a dtype, sizes and strides being tuples and no `torch.Size`.
Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

# The index of the current device, without asking each time whether CUDA was started.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

# In torch._C._dynamo.guards. It allocates on the current GPU, whichever that is.
INNER = "_empty_strided_cuda"


@cache
def allocator(device: torch.device) -> Empty:
    """What makes tensors on a device."""
    public = _public(device)
    inner: Empty | None = getattr(getattr(torch._C._dynamo, "guards", None), INNER, None)
    if device.type != "cuda" or inner is None or not _makes_the_same(inner, _public(torch.device("cuda"))):
        return public
    return inner if torch.cuda.device_count() == 1 else _on_current(device.index, inner, public)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that torch gives a tensor of a shape if it has no gaps."""
    if len(shape) == 3:
        # What most models bring, in a third of the time.
        _, rows, n = shape
        return (rows or 1) * (n or 1), n or 1, 1
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    return tuple(strides[::-1])


def _public(device: torch.device) -> Empty:
    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if transforming():
            # What is made there is wrapped, and has no memory.
            raise TransformError(
                "a kernel's outputs cannot be made within a transform of torch.func; "
                "call normforge.layer_norm or rms_norm there, which run torch's own operator"
            )
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


def _on_current(index: int, inner: Empty, public: Empty) -> Empty:
    """The inner one where it allocates on this device."""

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return (inner if current_device() == index else public)(size, stride, dtype)

    return empty


def _makes_the_same(inner: Empty, public: Empty) -> bool:
    asked = ((2, 3), (4, 1), torch.float16)
    expected = public(*asked)
    try:
        made = inner(*asked)
    except (RuntimeError, TypeError):
        return False
    return isinstance(made, torch.Tensor) and _facts(made) == _facts(expected)


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
