"""What a key says of a tensor, and what is looked at in each call because no key can hold it."""

from __future__ import annotations

from typing import Any

import torch

from .arguments import LARGEST_FP32
from .compiled import ALIGNMENT
from .errors import LayoutError

# An address with any of these bits is not aligned.
MISALIGNED = ALIGNMENT - 1

# Anything else may answer the same questions and be something else: a subclass with a storage of its own kind, say.
PLAIN: frozenset[type] = frozenset((torch.Tensor, torch.nn.Parameter))


# The offset of calls that have none.
ZERO = 0.0


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
        Unlike: it has not x's shape, is elsewhere, or has no memory.
    """
    at = rows.data_ptr()
    if not at or rows.__class__ not in PLAIN or rows.device != device or rows.shape != shape:
        raise Unlike
    return at, rows.dtype if rows.is_contiguous() else layout_of(rows)


def vector_of(vector: torch.Tensor, n: int, device: torch.device) -> tuple[int, torch.dtype]:
    """The same of an (N,) operand.

    Raises:
        Unlike: it is not one, is elsewhere, has gaps, or has no memory.
    """
    at = vector.data_ptr()
    if (
        not at
        or vector.__class__ not in PLAIN
        or vector.device != device
        or vector.shape != (n,)
        or not vector.is_contiguous()
    ):
        raise Unlike
    return at, vector.dtype


def address_of(tensor: torch.Tensor | None) -> int:
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
            f"a tensor of shape {tuple(tensor.shape)} ({type(tensor).__name__}) has no memory that a kernel could "
            "read: a transform of torch.func wraps it, or its class keeps its values elsewhere; pass a plain tensor, "
            "or call normforge.layer_norm or rms_norm, which run torch's own operator in a transform"
        )
    return at


def offset_fits(weight_offset: float, weight: torch.Tensor | None) -> bool:
    """Whether weight_offset, if it is not `ZERO` itself, needs no check."""
    if weight_offset.__class__ is not float:
        return False
    return weight_offset == 0.0 or (weight is not None and -LARGEST_FP32 <= weight_offset <= LARGEST_FP32)
