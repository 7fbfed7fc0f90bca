"""Whether two strided tensors may share memory."""

from __future__ import annotations

import torch


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


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * tensor.element_size()


def _row_bytes(tensor: torch.Tensor) -> int | None:
    strides = [
        stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1 and stride > 0
    ]
    return strides[-1] * tensor.element_size() if strides else None
