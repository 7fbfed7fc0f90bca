"""Tensors by their properties: dtype, layout, what holds them, and whether a gradient is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import cases

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


def _lead_of_one(tensor: torch.Tensor) -> torch.Tensor:
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step if size > 1 else 977)
        step *= size or 1
    return tensor.as_strided(tensor.shape, strides[::-1])


_OWN: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ragged": partial(cases._wide, 1),
    "strided": lambda tensor: torch.stack((tensor, tensor), -1)[..., 0],
    "every other": lambda tensor: tensor.repeat_interleave(2, 0)[::2],
    "permuted": lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.dim() > 2 else tensor,
    "rows expanded": lambda tensor: tensor[(0,) * (tensor.dim() - 1)].expand(tensor.shape),
    "negated": torch._neg_view,
    "conjugate's": cases.LAYOUTS["negated"],
    "lead of one": _lead_of_one,
}
# In the order from which a seed's sequences follow.
LAYOUTS = {
    name: {**cases.LAYOUTS, **_OWN}[name]
    for name in (
        *("contiguous", "offset", "gapped", "ragged", "strided", "every other", "transposed", "channels last"),
        *("permuted", "expanded", "rows expanded", "negated", "conjugate's", "lead of one"),
    )
}


def laid(layout: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of numbers that no kernel reads; contiguous if torch lacks a layout of a dtype or shape."""
    tensor = torch.ones(tuple(shape), dtype=torch.float32).to(dtype)
    try:
        return LAYOUTS[layout](tensor)
    except (RuntimeError, IndexError):
        return tensor


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
    """Return a tensor, or what stands in its place, of some properties; not every holder takes each layout."""
    try:
        return _held(operand, laid(operand.layout, shape, dtype))
    except (RuntimeError, IndexError):
        plain = laid("contiguous", shape, dtype)
        return plain if operand.holder == "sparse" else _held(operand, plain)


def _held(operand: Operand, tensor: torch.Tensor) -> Any:
    if operand.grad and operand.holder != "inference" and tensor.dtype.is_floating_point and tensor.itemsize > 1:
        tensor = tensor.detach().requires_grad_()
    held = HOLDERS[operand.holder](tensor)
    return held.detach().requires_grad_() if operand.holder == "lazy copy" and tensor.requires_grad else held
