"""What a key says of a tensor, and what is looked at in each call because no key can hold it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ..errors import DTypeError, LayoutError
from ..kernels.key import ALIGNMENT
from .arguments import LARGEST_FP32
from .backend import sees_operators

T = TypeVar("T")

# An address with any of these bits is not aligned.
MISALIGNED = ALIGNMENT - 1

# Anything else may answer the same questions and be something else: a subclass with a storage of its own kind, say.
PLAIN: frozenset[type] = frozenset((torch.Tensor, torch.nn.Parameter))


# The offset of calls that have none.
ZERO = 0.0


class Foreign(DTypeError):
    """A tensor of a class that sees the operators it is given to, and whose own memory, if any, holds no values."""


class Unlike(Exception):
    """What was passed is unlike all that can be known by a key; it need not be wrong."""


# What reading an attribute may raise of something that is no plain tensor, or of one without memory (a sparse one), and
# what looking up a key may of an argument that cannot be hashed.
UNREADABLE = (Unlike, AttributeError, IndexError, RuntimeError, TypeError, ZeroDivisionError)


def layout_of(rows: torch.Tensor) -> Any:
    """What a key holds of rows with gaps: two strides give the row stride, of more it depends on the shape."""
    strides = rows.stride()
    return (rows.dtype, strides) if len(strides) == 2 else (rows.dtype, strides, rows.shape)


def rows_of(rows: torch.Tensor, shape: torch.Size, device: torch.device) -> tuple[int, Any]:
    """The address of an operand of x's shape, and what a key holds of it.

    Raises:
        Unlike: it has not x's shape, or is elsewhere or nowhere, or is another one negated.
    """
    # Its class first: reading a fake tensor's address is a warning.
    if (
        rows.__class__ not in PLAIN
        or rows.device != device
        or rows.shape != shape
        or not (at := rows.data_ptr())
        or rows.is_neg()
    ):
        raise Unlike
    return at, rows.dtype if rows.is_contiguous() else layout_of(rows)


def vector_of(vector: torch.Tensor, n: int, device: torch.device) -> tuple[int, torch.dtype]:
    """The same of an (N,) operand.

    Raises:
        Unlike: it is not one, is elsewhere or nowhere, has gaps, or is another one negated.
    """
    if (
        vector.__class__ not in PLAIN
        or vector.device != device
        or vector.shape != (n,)
        or not vector.is_contiguous()
        or not (at := vector.data_ptr())
        or vector.is_neg()
    ):
        raise Unlike
    return at, vector.dtype


def offset_fits(weight_offset: float, weight: torch.Tensor | None) -> bool:
    """Whether weight_offset, if it is not `ZERO` itself, needs no check."""
    if weight_offset.__class__ is not float:
        return False
    return weight_offset == 0.0 or (weight is not None and -LARGEST_FP32 <= weight_offset <= LARGEST_FP32)


def refuse_foreign(**tensors: torch.Tensor | None) -> None:
    """Refuse tensors that an operator can be given, and a kernel not.

    Raises:
        Foreign: there is one.
    """
    for name, tensor in tensors.items():
        if sees_operators(tensor):
            raise Foreign(
                f"{name} is a {type(tensor).__name__}, and kernels read memory; pass the tensor that it stands for"
            )


def resolved(tensor: T) -> T:
    """The tensor itself, or a copy where its memory holds the negative of what it stands for."""
    if isinstance(tensor, torch.Tensor) and tensor.is_neg():
        return tensor.resolve_neg()  # type: ignore[return-value]  # a Tensor, as it was
    return tensor


def address_of(name: str, tensor: torch.Tensor | None) -> int:
    """The address of a tensor that was checked; 0 if there is none, or nothing in it.

    Raises:
        LayoutError: it has no memory of its own.
    """
    if tensor is None:
        return 0
    try:
        at = tensor.data_ptr()
    except RuntimeError:
        at = 0
    if not at and tensor.numel():
        raise LayoutError(
            f"{name} (shape {tuple(tensor.shape)}, {type(tensor).__name__}) has no memory that a kernel could use: its "
            "storage was freed, a transform of torch.func wraps it, or its class keeps its values elsewhere; pass a "
            "plain tensor, or call normforge.layer_norm or rms_norm, which run torch's own operator in a transform"
        )
    return at
