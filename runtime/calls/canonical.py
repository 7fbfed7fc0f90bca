"""Under batch invariance: tensors that lie in memory as N alone says, so that one kernel serves a row wherever it was.

How Triton cuts a row among threads, and so in what order it is added up, follows from what the address of the row is a
multiple of. Of rows that adjoin N says that. What lies otherwise is copied; what lies better is read no better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..codegen.families import Kind, Parameter
from ..kernels.strides import row_alignment, starts_aligned
from ..selection import invariance
from .check import Call
from .known import MISALIGNED


def settled(call: Call, rows: Iterable[Parameter]) -> Call:
    """Return a call of tensors that lie as N says: the call itself if its tensors do."""
    copies: dict[str, torch.Tensor] = {}
    for row in rows:
        tensor: torch.Tensor | None = getattr(call, row.name)
        if tensor is None or not row.is_read_in_vectors:
            continue
        if not lies_so(tensor, call.n, of_rows=row.kind.has_row_stride):
            # The results are copied from there to the place that was passed.
            empties = row.kind is Kind.PLACE
            copies[row.name] = _like(tensor) if empties else _like(tensor).copy_(tensor)
    return call.given_with(**copies) if copies else call


def in_place_of(tensors: Mapping[str, torch.Tensor | None], n: int, of_rows: Iterable[str]) -> dict[str, Any]:
    """Return tensors by name, copied where a batch-invariant call needs that; `of_rows` names those that have rows."""
    found = dict(tensors)
    if invariance.is_on():
        for name, tensor in tensors.items():
            if tensor is not None and not lies_so(tensor, n, of_rows=name in of_rows):
                found[name] = _like(tensor).copy_(tensor)
    return found


def lies_so(tensor: torch.Tensor, n: int, *, of_rows: bool) -> bool:
    """Return True if a tensor, of rows of n or a vector, lies as N says."""
    if of_rows and not starts_aligned(n):
        return True
    if tensor.data_ptr() & MISALIGNED:
        return False
    leading = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return not of_rows or all(stride % row_alignment(n) == 0 for size, stride in leading if size > 1)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
