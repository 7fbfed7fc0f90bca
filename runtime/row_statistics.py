"""fp32 values in pieces of one tensor: the mean and rstd of each row, as autograd keeps them, in one allocation.

Kernels are compiled for pointers at multiples of 16 bytes, so that is where each piece starts, whatever M is.
"""

from __future__ import annotations

import torch

from .compiled import ALIGNMENT

_ITEMSIZE = 4


def aligned_length(length: int) -> int:
    """The fp32 values from one piece of a tensor to the next, if each starts at a multiple of 16 bytes."""
    per_step = ALIGNMENT // _ITEMSIZE
    return -(-length // per_step) * per_step


def packed_length(m: int, *, mean: bool) -> int:
    """How long the statistics of m rows are: rstd, behind the means where there are any."""
    return aligned_length(m) + m if mean else m


def rstd_address(packed: int, m: int) -> int:
    """Where rstd starts, if the means of m rows start at `packed`."""
    return packed + _ITEMSIZE * aligned_length(m)


def unpacked(packed: torch.Tensor, m: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The means of m rows, if there are any, and rstd, as views."""
    return (None, packed) if packed.numel() == m else (packed[:m], packed[aligned_length(m) :])
