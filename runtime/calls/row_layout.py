"""How rows lie in memory: the stride that kernels walk them by, or the few strides, and how to come by them."""

from __future__ import annotations

import math

import torch

from ..codegen.families import Kind
from ..errors import LayoutError
from ..kernels.strides import RowStride, RowWalk

# Two are what heads of a packed qkv have, (tokens, heads, N). Three are what attention leaves of a gradient, which is
# (batch, heads, tokens, N) in memory and (batch, tokens, heads, N) to the norm.
MOST_STRIDES = 3


def row_stride(name: str, tensor: torch.Tensor) -> RowStride:
    """Return the stride, in elements, from row to row of a (..., N) tensor, or the two or three strides.

    Raises:
        LayoutError: the last dimension is not contiguous, or the leading ones need more strides than three.
    """
    n = tensor.shape[-1]
    if n > 1 and tensor.stride(-1) != 1:
        raise LayoutError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension and kernels need 1; pass {name}.contiguous()"
        )
    # First, because in a trace a number of rows that depends on data can be compared with nothing.
    if tensor.is_contiguous():
        return n
    leading = _collapsed(tensor)
    if not leading or tensor.numel() == 0:
        return n
    if len(leading) == 1:
        return leading[0][1]
    if len(leading) > MOST_STRIDES:
        raise LayoutError(
            f"the leading dimensions of {name} (shape {tuple(tensor.shape)}, strides {tensor.stride()}) do not "
            f"collapse to {MOST_STRIDES} row strides or fewer; pass {name}.contiguous()"
        )
    return RowWalk(tuple([stride for _, stride in leading]), tuple([size for size, _ in leading[1:]]))


def stride_of(kind: Kind | None, name: str, tensor: torch.Tensor, x: torch.Tensor) -> RowStride:
    """Return the row stride of a tensor that has a row per row of x; per sample, or per group, if its kind says so.

    Of samples always on two strides, so that the kernel of one sample is that of several. Rows of x cycle through
    groups. One row for all has stride 0.
    """
    stride = row_stride(name, tensor)
    if kind is Kind.GROUPS:
        groups = tensor.shape[0] if tensor.dim() > 1 else 1
        return RowWalk((0, tensor.stride(0)), (groups,)) if groups > 1 else 0
    if kind is not Kind.SAMPLES or tensor.shape == x.shape:
        return stride
    if tensor.dim() == 1:
        return 0
    rows = math.prod(x.shape[1:-1])
    return RowWalk((tensor.stride(0), 0), (rows,)) if rows > 1 else tensor.stride(0)


def _collapsed(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of the leading dimensions, where neighbours that one stride walks are one."""
    collapsed: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size == 1:
            continue
        if collapsed and collapsed[-1][1] == size * stride:
            collapsed[-1] = (collapsed[-1][0] * size, stride)
        else:
            collapsed.append((size, stride))
    return collapsed


def walkable(rows: torch.Tensor) -> torch.Tensor:
    """Rows that kernels can walk: the very tensor, or a contiguous copy of one with other strides."""
    try:
        row_stride("rows", rows)
    except LayoutError:
        # Not contiguous(), which takes an empty tensor of any strides for contiguous.
        return rows.clone(memory_format=torch.contiguous_format)
    return rows
