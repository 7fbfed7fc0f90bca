"""The parts of `torch._C._dynamo.guards` that calls use: guards of tensors, and an allocator.

TorchDynamo guards what it compiled by the class, dispatch keys (device, negation, and whatever sees operators: modes,
transforms, autocast), dtype, sizes and strides of every tensor, and by whether it requires a gradient, in one call of
C++: 0.26 us for three tensors, where asking each for its attributes takes 1.4. `torch.empty` and `new_empty` take
1.8 us on the host of an H200, most of it in torch's dispatcher; what Inductor's code allocates with takes 1.0. Both are
torch's own business and may change, so they are used here alone, tried before they are trusted, and done without where
they are missing or do something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import TransformError
from .torch_internals import dispatch_modes, transforming

# Takes as many tensors as were guarded, in their order, and returns True if each is like its counterpart.
Fits = Callable[..., bool]
# The sizes or strides of each tensor; None where they may be any.
Pattern = Sequence[Sequence[int | None]]


def guard(tensors: Sequence[torch.Tensor], sizes: Pattern, strides: Pattern) -> Fits:
    """Return a check of whether tensors, and the modes around their call, are like these; it keeps no tensor."""
    inner = _inner()
    make = inner if inner is not None and _tells_apart(inner) else by_attributes
    return make(tensors, sizes, strides)


def by_attributes(tensors: Sequence[torch.Tensor], sizes: Pattern, strides: Pattern) -> Fits:
    """Return the check of `guard`, made from the attributes of each tensor."""
    like = [(_facts(tensor), size, step) for tensor, size, step in zip(tensors, sizes, strides, strict=True)]
    surroundings = _surroundings()

    def fits(*others: Any) -> bool:
        return surroundings == _surroundings() and all(
            _facts(other) == facts and _matches(other.shape, size) and _matches(other.stride(), stride)
            for other, (facts, size, stride) in zip(others, like, strict=True)
        )

    return fits


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        *(type(tensor), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_neg(), tensor.is_inference()),
        _keys(tensor),
    )


# The dispatch keys of a tensor. Only the keys, and neither class nor dtype, show that a tensor represents several, as
# autograd's batched gradients do.
_keys: Callable[[torch.Tensor], object] = getattr(torch._C, "_dispatch_keys", lambda tensor: None)


def _matches(sizes: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(sizes) == len(wanted) and all(want in (None, size) for size, want in zip(sizes, wanted, strict=True))


def _surroundings() -> tuple[object, ...]:
    return (
        dispatch_modes(),
        transforming(),
        torch._C._get_tracing_state() is None,
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(device) for device in ("cuda", "cpu")),
    )


def _of_dynamo(name: str) -> Any:
    """Return a name of `torch._C._dynamo.guards`, or None if this torch lacks the name."""
    return getattr(getattr(torch._C._dynamo, "guards", None), name, None)


@cache
def _inner() -> Callable[..., Fits] | None:
    guards = _of_dynamo("TensorGuards")
    if guards is None:
        return None
    return lambda tensors, sizes, strides: (
        guards(*tensors, dynamic_dims_sizes=list(map(list, sizes)), dynamic_dims_strides=list(map(list, strides))).check
    )


class _Subclass(torch.Tensor):
    pass


# Made by `type`, as torch declares no types of what a subclass's statement calls.
_Mode: Callable[[], Any] = type("_Mode", (TorchDispatchMode,), {})


@cache
def _tells_apart(make: Callable[..., Fits]) -> bool:
    """Return True if guards that `make` makes tell a few tensors from each other."""
    # A separate thread has none of the modes, transforms and default devices that the first call may be made within.
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(_is_right, make).result()
        except (RuntimeError, TypeError):
            return False


def _is_right(make: Callable[..., Fits]) -> bool:
    rows = partial(torch.empty, dtype=torch.float32, device="cpu")
    usual, vector = rows(2, 8), rows(8)
    fits = make([usual, vector], [[None, 8], [8]], [[8, 1], [1]])
    alike = [(usual, vector), (rows(5, 8), rows(8))]
    others = [
        rows(2, 8, dtype=torch.float16),
        rows(2, 8, device="meta"),
        rows(2, 8, requires_grad=True),
        torch.nn.Parameter(usual, requires_grad=False),
        usual.as_subclass(_Subclass),
        torch._neg_view(usual),
        rows(2, 9)[:, :8],
        rows(2, 9),
        rows(2, 1, 8),
        rows(8),
    ]
    answers = [fits(*pair) for pair in alike] + [not fits(other, vector) for other in others]
    answers.append(not fits(usual, rows(9)))
    with torch.no_grad():
        answers.append(fits(usual, vector))
    for context in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), _Mode()):
        with context:
            answers.append(not fits(usual, vector))

    def within(row: torch.Tensor) -> torch.Tensor:
        answers.append(not fits(usual, vector))
        return row

    torch.func.vmap(within)(usual)
    return all(answers)


# From sizes, strides and a dtype, sizes and strides being tuples and no `torch.Size`.
Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

# The index of the current device, without asking each time whether CUDA was started.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

# Torch's inner allocator, which allocates on the current GPU.
INNER = "_empty_strided_cuda"


@cache
def allocator(device: torch.device) -> Empty:
    """Return the allocator of a device."""
    public = _public(device)
    inner: Empty | None = _of_dynamo(INNER)
    if device.type != "cuda" or inner is None or not _makes_the_same(inner, _public(torch.device("cuda"))):
        return public
    return inner if torch.cuda.device_count() == 1 else _on_current(device.index, inner, public)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of a shape."""
    if len(shape) == 3:
        # Most models bring three dimensions, which this serves in a third of the time.
        _, rows, n = shape
        return (rows or 1) * (n or 1), n or 1, 1
    return tuple(accumulate([size or 1 for size in shape[:0:-1]], mul, initial=1))[::-1] if shape else ()


def _public(device: torch.device) -> Empty:
    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if transforming():
            # Tensors made within a transform are wrapped, and have no memory.
            raise TransformError(
                "a kernel's outputs cannot be made within a transform of torch.func; "
                "call normforge.layer_norm or rms_norm there, which run torch's own operator"
            )
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


def _on_current(index: int, inner: Empty, public: Empty) -> Empty:
    """Return an allocator that calls the inner one if this device is the current one, and else the public one."""

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return (inner if current_device() == index else public)(size, stride, dtype)

    return empty


def _makes_the_same(inner: Empty, public: Empty) -> bool:
    asked = ((2, 3), (4, 1), torch.float16)
    expected = public(*asked)
    try:
        guarded = inner(*asked)
    except (RuntimeError, TypeError):
        return False
    is_like = by_attributes([expected], [expected.shape], [expected.stride()])
    return isinstance(guarded, torch.Tensor) and is_like(guarded)
