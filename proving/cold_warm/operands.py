"""Tensors by their properties: dtype, layout, what holds them, and whether a gradient is due."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


class Operand(NamedTuple):
    """The properties of one tensor.

    Attributes:
        dtype: its dtype; None for the dtype that a result has.
        layout: a name of `LAYOUTS`.
        holder: a name of `HOLDERS`.
        grad: whether it requires a gradient.
        form: a name of `FORMS`; "" for the parameter's first.
    """

    dtype: torch.dtype | None = torch.float32
    layout: str = "contiguous"
    holder: str = "tensor"
    grad: bool = False
    form: str = ""


class Subclass(torch.Tensor):
    """A tensor subclass that leaves all to torch."""


Shape = Sequence[int]


def numbers(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of fixed numbers that no kernel reads."""
    return (
        torch.ones(math.prod(shape) + 8, dtype=torch.float32).to(dtype)[: math.prod(shape)].view(tuple(shape)).clone()
    )


def _offset(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return numbers([math.prod(shape) + 1], dtype)[1:].view(tuple(shape))


def _wide(by: int, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    return numbers([*shape[:-1], shape[-1] + by], dtype)[..., : shape[-1]]


def _lead_of_one(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step if size > 1 else 977)
        step *= size or 1
    return numbers(shape, dtype).as_strided(tuple(shape), strides[::-1])


def _transposed(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return numbers([shape[-1], *shape[:-1]], dtype).movedim(0, -1)


def _channels_last(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return (
        numbers([shape[0], *shape[2:], *shape[1:2]], dtype).movedim(-1, 1) if len(shape) > 2 else numbers(shape, dtype)
    )


def _permuted(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    if len(shape) < 3:
        return numbers(shape, dtype)
    return numbers([shape[1], shape[0], *shape[2:]], dtype).transpose(0, 1)


LAYOUTS: Mapping[str, Callable[[Shape, torch.dtype], torch.Tensor]] = {
    "contiguous": numbers,
    "offset": _offset,
    "gapped": lambda shape, dtype: _wide(shape[-1], dtype, shape),
    "ragged": lambda shape, dtype: _wide(1, dtype, shape),
    "strided": lambda shape, dtype: numbers([*shape, 2], dtype)[..., 0],
    "every other": lambda shape, dtype: numbers([2 * shape[0], *shape[1:]], dtype)[::2],
    "transposed": _transposed,
    "channels last": _channels_last,
    "permuted": _permuted,
    "expanded": lambda shape, dtype: numbers([1] * len(shape), dtype).expand(tuple(shape)),
    "rows expanded": lambda shape, dtype: numbers([*[1] * (len(shape) - 1), shape[-1]], dtype).expand(tuple(shape)),
    "negated": lambda shape, dtype: torch._neg_view(numbers(shape, dtype)),
    "conjugate's": lambda shape, dtype: torch.view_as_complex(numbers([*shape, 2], torch.float32)).conj().imag,
    "lead of one": _lead_of_one,
}


def _in_inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


def _sharded(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, init_device_mesh("cpu", (1,)), [Replicate()], run_check=False)


HOLDERS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=tensor.requires_grad),
    "subclass": lambda tensor: tensor.as_subclass(Subclass),
    "inference": _in_inference,
    "lazy copy": torch._lazy_clone,
    "DTensor": _sharded,
    "sparse": lambda tensor: tensor.to_sparse(),
    "meta": lambda tensor: tensor.to("meta"),
    "array": lambda tensor: np.zeros(tuple(tensor.shape), np.float32),
    "list": lambda tensor: tensor.tolist(),
}
# In the proportions in which they are drawn.
USUAL_LAYOUTS = ("contiguous",) * 12 + ("offset",) * 6 + ("negated", "gapped") * 2 + tuple(LAYOUTS)
USUAL_HOLDERS = ("tensor",) * 10 + ("parameter",) * 3 + ("subclass", "inference", "lazy copy", *HOLDERS)


def built(operand: Operand, shape: Shape, dtype: torch.dtype) -> Any:
    """Return a tensor, or what stands in its place, of some properties; torch has not each layout of each dtype."""
    try:
        return _held(operand, LAYOUTS[operand.layout](shape, dtype))
    except (RuntimeError, IndexError):
        return _held(operand, numbers(shape, dtype)) if operand.holder != "sparse" else numbers(shape, dtype)


def _held(operand: Operand, tensor: torch.Tensor) -> Any:
    if operand.grad and operand.holder != "inference" and tensor.dtype.is_floating_point and tensor.itemsize > 1:
        tensor = tensor.detach().requires_grad_()
    held = HOLDERS[operand.holder](tensor)
    return held.detach().requires_grad_() if operand.holder == "lazy copy" and tensor.requires_grad else held
