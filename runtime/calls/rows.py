"""The functional API's arguments: checked, and brought into the rows that kernels take."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..codegen.model import Norm
from ..dtypes import FLOATS
from ..errors import DTypeError, LayoutError, ShapeError
from .arguments import check_device, check_dtype, check_number, check_tensor, row_stride

# What torch's operators normalise, and the kernels do not.
_DOUBLE = (*FLOATS, torch.float64)


def check(
    norm: Norm,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float | None,
    *,
    kernel: bool,
) -> tuple[int, ...]:
    """Check what a call of the functional API was given, and return normalized_shape as a tuple.

    Args:
        norm: which norm.
        x: what is normalised.
        normalized_shape: x's last dimensions.
        weight: normalized_shape, or None.
        bias: likewise.
        residual: x's shape, or None.
        eps: None is RMSNorm's default.
        kernel: whether a kernel is to run, which takes no float64.

    Raises:
        ShapeError: normalized_shape is not what x's shape ends in, or another tensor's shape does not fit.
        DTypeError: a tensor is of a type that cannot be normalised, or an argument is no tensor.
        DeviceError: tensors are on several devices.
        LayoutError: a tensor is sparse or nested.
        ConflictError: eps is no number of at least 0.
    """
    dtypes = FLOATS if kernel else _DOUBLE
    check_dtype("x", check_tensor("x", x), dtypes)
    shape = _dimensions(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ShapeError(
            f"normalized_shape is {shape} and x has shape {tuple(x.shape)}; "
            "it takes the last dimensions of x, one or more"
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            _check_operand(name, parameter, shape, "normalized_shape", x, dtypes)
    if residual is not None:
        _check_operand("residual", residual, tuple(x.shape), "x's shape", x, dtypes)
    if eps is not None or norm.centres:
        check_number("eps", eps, least=0.0)
    return shape


def _dimensions(normalized_shape: Sequence[int]) -> tuple[int, ...]:
    try:
        if isinstance(normalized_shape, Sequence):
            return tuple([_integer(size) for size in normalized_shape])
    except TypeError:
        pass
    raise DTypeError(f"normalized_shape is {normalized_shape!r}; it takes a tuple of integers, (64,) say")


def _integer(size: Any) -> Any:
    # A size that is symbolic in a trace is to stay so.
    return size if isinstance(size, (int, torch.SymInt)) else operator.index(size)


def _check_operand(
    name: str,
    operand: torch.Tensor,
    shape: tuple[int, ...],
    shape_name: str,
    x: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    check_tensor(name, operand)
    if tuple(operand.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(operand.shape)}; it takes {shape}, {shape_name}")
    check_dtype(name, operand, dtypes)
    check_device(name, operand, x)


def as_rows(tensor: torch.Tensor, dimensions: int) -> torch.Tensor:
    """A tensor as (..., N) with one row stride, N being its last `dimensions` together; copied once if need be."""
    return walkable(tensor.flatten(-dimensions))


def walkable(rows: torch.Tensor) -> torch.Tensor:
    """Rows that kernels can walk: the very tensor, or a contiguous copy of one with other strides."""
    try:
        row_stride("rows", rows)
    except LayoutError:
        # Not contiguous(), which takes an empty tensor of any strides for contiguous.
        return rows.clone(memory_format=torch.contiguous_format)
    return rows
