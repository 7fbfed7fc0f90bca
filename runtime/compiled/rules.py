"""Which norms of a compiled graph are left to Inductor, which makes torch's operators of them part of its own kernels.

A row is put here where a measurement says that Inductor's norm, fused with what stands beside it, is as fast as ours
with the passes: `python -m benchmarks models`, compiled steps of `torch` beside those of `patch-passes`.
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
        scaled: whether rows are multiplied by a weight.
        recorded: whether a gradient is recorded.
    """

    norm: str
    dtype: torch.dtype
    first: int
    last: int
    scaled: bool
    recorded: bool


# On an H200 with torch 2.11 at 2baeb10. Training Llama took 1.013 of the time that Inductor's norms took (left to it,
# at f4997ac, 1.009); at N = 1024 (Qwen3, T5) 1.001 and 0.993. Training DiT took 1.06 and more: its norms have no
# weight, and Inductor makes one kernel of norm and modulation.
LEFT_TO_INDUCTOR: tuple[Left, ...] = (
    Left("rms", torch.bfloat16, 2048, 2048, scaled=True, recorded=True),
    Left("layer", torch.bfloat16, 1, 65536, scaled=False, recorded=True),
)


def is_left_to_inductor(norm: str, x: torch.Tensor, shape: tuple[int, ...], *, scaled: bool) -> bool:
    """Whether a norm over some dimensions of x stays torch's operator where it is compiled, with the passes on."""
    if not LEFT_TO_INDUCTOR or not switch.is_enabled():
        return False
    n, recorded = math.prod(shape), torch.is_grad_enabled()
    return any(
        (row.norm, row.dtype, row.scaled, row.recorded) == (norm, x.dtype, scaled, recorded)
        and row.first <= n <= row.last
        for row in LEFT_TO_INDUCTOR
    )
