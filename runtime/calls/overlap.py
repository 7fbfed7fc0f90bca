"""Whether what a call writes shares memory with what it reads: one question, asked the cheap way first.

A call of a known kind has the extents of its rows by its plan, so where outputs and inputs lie apart a few comparisons
of addresses say so. Where they may meet, and of a kind that is not known, strides are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# The inputs that an output may be: each row is read before it is written. A vector is read by every row.
REPLACEABLE = frozenset(("x", "residual"))


# Bytes of a row, and from one row to the next.
Extent = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Extents:
    """Where the tensors of a kind of call lie, from their first bytes.

    Attributes:
        inputs: of each tensor that is there: its place among a call's, the bytes of a row, those from one row to the
            next, and whether an output may be that very tensor.
        y: of y.
        total: of residual_out.
    """

    inputs: tuple[tuple[int, int, int, bool], ...] = ()
    y: Extent = (0, 0)
    total: Extent = (0, 0)


def may_write(
    extents: Extents,
    addresses: tuple[int, ...],
    tensors: tuple[torch.Tensor | None, ...],
    m: int,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
) -> bool:
    """Whether outputs may be written to, and share no memory with anything but the x or residual that they are.

    Args:
        extents: of the call's kind.
        addresses: of its inputs; 0 where there is none.
        tensors: likewise.
        m: its rows.
        out: where y goes, or None for a new tensor.
        residual_out: likewise.
    """
    y_at = y_end = 0
    if out is not None:
        if not _is_writable(out):
            return False
        y_at = out.data_ptr()
        row, step = extents.y
        y_end = y_at + row + step * (m - 1)
        if not _spares(extents, addresses, tensors, m, out, y_at, y_end):
            return False
    if residual_out is None:
        return True
    if not _is_writable(residual_out):
        return False
    sum_at = residual_out.data_ptr()
    row, step = extents.total
    sum_end = sum_at + row + step * (m - 1)
    if out is not None and y_at < sum_end and sum_at < y_end and may_overlap(out, residual_out):
        return False
    return _spares(extents, addresses, tensors, m, residual_out, sum_at, sum_end)


def _is_writable(output: torch.Tensor) -> bool:
    # That it requires a gradient, a known call's guard tells.
    return not output.is_inference() or torch.is_inference_mode_enabled()


def _spares(
    extents: Extents,
    addresses: tuple[int, ...],
    tensors: tuple[torch.Tensor | None, ...],
    m: int,
    output: torch.Tensor,
    start: int,
    end: int,
) -> bool:
    for place, row, step, replaceable in extents.inputs:
        at = addresses[place]
        if at < end and start < at + row + step * (m - 1):
            tensor = tensors[place]
            if not (replaceable and tensor is output) and tensor is not None and spoils(output, tensor, replaceable):
                return False
    return True


def spoils(output: torch.Tensor, tensor: torch.Tensor, replaceable: bool) -> bool:
    """Whether writing an output may change another tensor, other than by taking its place if that may be done."""
    return may_overlap(output, tensor) and not (replaceable and _is_the_same(output, tensor))


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether any byte may belong to both of two (..., N) tensors whose rows are contiguous.

    Exact for tensors of one row stride (two halves of a wider tensor do not overlap); for others, whether the
    address ranges meet.
    """
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    a_first, a_last = _span(a)
    b_first, b_last = _span(b)
    if a_last <= b_first or b_last <= a_first:
        return False
    a_stride, b_stride = _row_bytes(a), _row_bytes(b)
    if a_stride is None or a_stride != b_stride:
        return True
    distance = (b_first - a_first) % a_stride
    a_width, b_width = a.shape[-1] * a.element_size(), b.shape[-1] * b.element_size()
    return distance < a_width or a_stride - distance < b_width


def _is_the_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of two (..., N) tensors of one shape and one row stride each: whether all elements are where the other's are."""
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and _row_bytes(a) == _row_bytes(b)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * tensor.element_size()


def _row_bytes(tensor: torch.Tensor) -> int | None:
    strides = [
        stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1 and stride > 0
    ]
    return strides[-1] * tensor.element_size() if strides else None
