"""The layout of rows in memory: the stride or few strides that kernels walk, and overlap of outputs with inputs.

Overlap is looked for the cheap way first. The plan of a known kind of call holds the extents of rows, so that a few
comparisons of addresses show that outputs and inputs are disjoint. Strides decide where the extents meet, and for kinds
that are not known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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


# The inputs that an output may be: each row is read before it is written. A vector is read by every row.
REPLACEABLE = frozenset(("x", "residual"))


# Bytes of a row, and from one row to the next.
Extent = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Extents:
    """The extents in memory of the tensors of a kind of call, from their first bytes.

    Attributes:
        inputs: of each tensor that is there: its place among a call's, the bytes of a row, those from one row to the
            next, and whether an output may be that very tensor.
        y: of y.
        total: of residual_out.
    """

    inputs: tuple[tuple[int, int, int, bool], ...] = ()
    y: Extent = (0, 0)
    total: Extent = (0, 0)


def extent_of(stride: RowStride, n: int, itemsize: int) -> Extent:
    """Return the bytes of a row of n elements, and from one row to the next.

    Of rows on several strides, bytes of which so many rows take no less than theirs take.
    """
    if not isinstance(stride, RowWalk):
        return n * itemsize, stride * itemsize
    outer = stride.strides[0]
    step = -(-outer // stride.rows)
    return (n + stride.reach - outer + step) * itemsize, step * itemsize


def may_write(
    extents: Extents,
    addresses: tuple[int, ...],
    tensors: tuple[torch.Tensor | None, ...],
    m: int,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
) -> bool:
    """Return True if outputs can be written and share no memory with inputs, but for the x or residual that they are.

    Args:
        extents: of the call's kind.
        addresses: of its inputs; 0 where there is none.
        tensors: the inputs themselves; None where there is none.
        m: its rows.
        out: where y goes, or None for a new tensor.
        residual_out: where the stored sum goes, or None for a new tensor.
    """
    earlier, earlier_at, earlier_end = None, 0, 0
    for output, (row, step) in ((out, extents.y), (residual_out, extents.total)):
        if output is None:
            continue
        # A known call's guard knows whether the output requires a gradient.
        if output.is_inference() and not torch.is_inference_mode_enabled():
            return False
        start = output.data_ptr()
        end = start + row + step * (m - 1)
        for place, width, stride, replaceable in extents.inputs:
            at = addresses[place]
            if at < end and start < at + width + stride * (m - 1):
                tensor = tensors[place]
                if tensor is None or (replaceable and tensor is output):
                    continue
                if spoils(output, tensor, replaceable):
                    return False
        if earlier is not None and earlier_at < end and start < earlier_end and may_overlap(earlier, output):
            return False
        earlier, earlier_at, earlier_end = output, start, end
    return True


def spoils(output: torch.Tensor, tensor: torch.Tensor, replaceable: bool) -> bool:
    """Return True if writing an output may change another tensor, unless the output may replace the tensor and does."""
    return may_overlap(output, tensor) and not (replaceable and _is_the_same(output, tensor))


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if any byte may belong to both of two (..., N) tensors whose rows are contiguous.

    Exact where the strides of both are the same, but for those of rows that adjoin (two halves of a wider tensor do not
    overlap, nor do queries and keys of a packed one); where they are not, it may say so of rows that interleave.
    """
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    return _may_meet(b.data_ptr() - a.data_ptr(), *_steps(a), *_steps(b))


def rows_overlap(tensor: torch.Tensor) -> bool:
    """Return True if any two rows of a (..., N) tensor may overlap: some stride is less than the span within."""
    dimensions = [
        (size, stride) for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1
    ]
    # Not sorted by their strides: TorchDynamo, which follows this, sorts no pairs.
    for at, (_, stride) in enumerate(dimensions):
        span = tensor.shape[-1]
        for other, (size, shorter) in enumerate(dimensions):
            if other != at and shorter <= stride:
                span += (size - 1) * shorter
        if stride < span:
            return True
    return False


def elements_overlap(tensor: torch.Tensor) -> bool:
    """Return True if any two elements of a tensor of two dimensions, on strides above 0, are one."""
    (rows, columns), (row, column) = tensor.shape, tensor.stride()
    # Side by side, as they mostly are; in a trace sizes may be symbols, of which less is asked then.
    if row >= columns * column or column >= rows * row:
        return False
    # The greatest common divisor of both strides, by hand: of symbols math.gcd knows none.
    shared, rest = row, column
    while rest:
        shared, rest = rest, shared % rest
    # The fewest steps along either dimension that come to the same place.
    return column // shared < rows and row // shared < columns


def _is_the_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if all elements of two (..., N) tensors of one shape share their addresses."""
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and all(size < 2 or s == t for size, s, t in strides)


# The bytes and the number of steps from one group of rows to the next, the longest first.
_Steps = list[tuple[int, int]]

# Groups of one tensor that are compared with one group of another: two, where groups are no longer than the step.
_MOST_GROUPS = 8


def _steps(tensor: torch.Tensor) -> tuple[_Steps, int]:
    """Describe a (..., N) tensor by the bytes of its first block without gaps, and the steps that repeat the block."""
    itemsize = tensor.element_size()
    width = (tensor.shape[-1] if tensor.dim() else 1) * itemsize
    dimensions = zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    steps: _Steps = []
    for stride, size in sorted([(stride * itemsize, size) for stride, size in dimensions if size > 1 and stride > 0]):
        if not steps and stride <= width:
            width += (size - 1) * stride
        elif steps and stride == steps[0][0] * steps[0][1]:
            steps[0] = (steps[0][0], steps[0][1] * size)
        else:
            steps.insert(0, (stride, size))
    return steps, width


def _span(steps: _Steps, width: int) -> int:
    return width + sum((size - 1) * stride for stride, size in steps)


def _may_meet(distance: int, a: _Steps, a_width: int, b: _Steps, b_width: int) -> bool:
    """Return True if a byte may belong to both, where the second starts some bytes behind the first, or before."""
    if distance >= _span(a, a_width) or -distance >= _span(b, b_width):
        return False
    if not a and not b:
        return True
    stride = max(steps[0][0] for steps in (a, b) if steps)
    a_size, a_inner = (a[0][1], a[1:]) if a and a[0][0] == stride else (1, a)
    b_size, b_inner = (b[0][1], b[1:]) if b and b[0][0] == stride else (1, b)
    # How many steps further the second's group may be than the first's, if they are to meet.
    least = max(1 - a_size, (-distance - _span(b_inner, b_width)) // stride + 1)
    most = min(b_size - 1, -((distance - _span(a_inner, a_width)) // stride) - 1)
    if most - least >= _MOST_GROUPS:
        return True
    return any(
        _may_meet(distance + further * stride, a_inner, a_width, b_inner, b_width) for further in range(least, most + 1)
    )
