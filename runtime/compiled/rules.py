"""Which norms of a compiled graph are left to Inductor, which makes torch's operators of them part of its own kernels.

A row is put here where a measurement says that Inductor's norm, fused with what stands beside it, is as fast as ours
with the passes. None was made yet, so all are ours.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from . import switch


class Left(NamedTuple):
    """Norms that are left to Inductor.

    Plain values, because TorchDynamo follows what reads them.

    Attributes:
        norm: "layer" or "rms".
        dtype: x's.
        first: the least N.
        last: the largest one.
        recorded: whether a gradient is recorded.
    """

    norm: str
    dtype: torch.dtype
    first: int
    last: int
    recorded: bool


LEFT_TO_INDUCTOR: tuple[Left, ...] = ()


def is_left_to_inductor(norm: str, x: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a norm over some dimensions of x stays torch's operator where it is compiled, with the passes on."""
    if not LEFT_TO_INDUCTOR or not switch.is_enabled():
        return False
    n, recorded = math.prod(shape), torch.is_grad_enabled()
    return any(
        row.norm == norm and row.dtype == x.dtype and row.first <= n <= row.last and row.recorded == recorded
        for row in LEFT_TO_INDUCTOR
    )
