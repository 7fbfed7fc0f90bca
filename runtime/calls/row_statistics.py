"""fp32 values in pieces of one tensor: the mean and rstd of each row, as autograd keeps them, in one allocation.

Kernels are compiled for pointers at multiples of 16 bytes, so that is where each piece starts, whatever M is.
"""

from __future__ import annotations

import torch

from ..kernels.compiled import ALIGNMENT
from ..upstream.torch_allocator import Empty

_ITEMSIZE = 4
_STEP = ALIGNMENT // _ITEMSIZE


def aligned_length(length: int) -> int:
    """The fp32 values from one piece of a tensor to the next, if each starts at a multiple of 16 bytes."""
    return -(-length // _STEP) * _STEP


def pack(empty: Empty, m: int, mean: bool) -> tuple[torch.Tensor, int, int]:
    """Memory for the statistics of m rows, rstd behind the means if there are any, and the addresses of both."""
    start = aligned_length(m) if mean else 0
    packed = empty((start + m,), (1,), torch.float32)
    at = packed.data_ptr()
    return packed, at if mean else 0, at + _ITEMSIZE * start


def rstd_address(packed: int, m: int) -> int:
    """Where rstd starts, if the means of m rows start at `packed`."""
    return packed + _ITEMSIZE * aligned_length(m)


def unpacked(packed: torch.Tensor, m: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The means of m rows, if there are any, and rstd, as views."""
    return (None, packed) if packed.numel() == m else (packed[:m], packed[aligned_length(m) :])


def packed_of(*statistics: torch.Tensor) -> torch.Tensor:
    """What `pack` makes room for, of the means, if there are any, and rstd."""
    *means, rstd = (statistic.flatten() for statistic in statistics)
    padded = [torch.nn.functional.pad(mean, (0, aligned_length(mean.shape[0]) - mean.shape[0])) for mean in means]
    return torch.cat([*padded, rstd])
