"""How rows lie in memory: the one stride that kernels walk them by, and how to come by it."""

from __future__ import annotations

import itertools

import torch

from ..errors import LayoutError


def row_stride(name: str, tensor: torch.Tensor) -> int:
    """The one stride, in elements, that steps from row to row of a (..., N) tensor.

    Raises:
        LayoutError: the last dimension is not contiguous, or the leading ones need more than one stride.
    """
    n = tensor.shape[-1]
    if n > 1 and tensor.stride(-1) != 1:
        raise LayoutError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension and kernels need 1; pass {name}.contiguous()"
        )
    # First, because in a trace a number of rows that depends on data can be compared with nothing.
    if tensor.is_contiguous():
        return n
    leading = [
        (size, stride) for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size != 1
    ]
    if not leading or tensor.numel() == 0:
        return n
    for (_, outer), (size, inner) in itertools.pairwise(leading):
        if outer != size * inner:
            raise LayoutError(
                f"the leading dimensions of {name} (shape {tuple(tensor.shape)}, strides {tensor.stride()}) do not "
                f"collapse to one row stride; pass {name}.contiguous()"
            )
    return leading[-1][1]


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
