"""Which norms of a compiled graph are left to Inductor, which makes torch's operators of them part of its own kernels.

Left is what the model had, torch's operator or RMSNorm written out: by the operator Qwen3 took 1.011 (H200, 312f89b).

A row is put here where a measurement says that Inductor's norm, fused with what stands beside it, is as fast as ours
with the passes: `python -m benchmarks models`, compiled steps of `torch` beside those of `patch-passes`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..selection.invariance import is_on
from ..upstream.torch_internals import known_to_hold
from .switch import is_enabled


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


# On an H200 with torch 2.11. Training Llama took 1.013 of the time that Inductor's norms took (2baeb10; left to it, at
# f4997ac, 1.009, at c074537 1.001 and at 8b22ad6 0.988). At N = 1024 T5 took 0.993 and then 1.007, Qwen3 1.001, 0.993
# and 1.004 (2baeb10, f4997ac, c074537), and left to Inductor 0.999 and 1.014 (8b22ad6): nothing to be gained. Training
# DiT took 1.06 and more (2baeb10), and left to it 0.995 (8b22ad6): its norms have no weight, and Inductor makes one
# kernel of norm and modulation.
# Heads of Qwen3, N = 128, whose other norms were left to it, took 1.014 and 1.010 (8b22ad6, 7177f0d).
LEFT_TO_INDUCTOR: tuple[Left, ...] = (
    Left("rms", torch.bfloat16, 128, 128, scaled=True, recorded=True),
    Left("rms", torch.bfloat16, 1024, 1024, scaled=True, recorded=True),
    Left("rms", torch.bfloat16, 2048, 2048, scaled=True, recorded=True),
    Left("layer", torch.bfloat16, 1, 65536, scaled=False, recorded=True),
)


# Norms of fewer elements are left to it too: to call an operator within a compiled graph took the host some 80 us while
# Inductor's code went through torch's dispatcher, and to launch one of Inductor's kernels some 10. Eight rows through
# the 17 and 49 norms of Llama and Qwen3 took 4.06 and 7.74 ms with ours, 2.34 and 3.52 with Inductor's, and the same in
# CUDA graphs (an H200, 7db7536). From 2048 tokens of 2048 on, a step waits for the GPU.
LEAST_ELEMENTS = 1 << 22


def is_left_to_inductor(norm: str, x: torch.Tensor, shape: tuple[int, ...], *, scaled: bool) -> bool:
    """Return True if a compiled norm over some dimensions of x stays torch's, with the passes on."""
    # The blocks of Inductor's kernels follow from M.
    if not is_enabled() or is_on():
        return False
    # A varying size gets no guard, which would recompile the graph at the limit.
    if known_to_hold(x.numel() < LEAST_ELEMENTS):
        return True
    n, recorded = math.prod(shape), torch.is_grad_enabled()
    return any(
        (row.norm, row.dtype, row.scaled, row.recorded) == (norm, x.dtype, scaled, recorded)
        and row.first <= n <= row.last
        for row in LEFT_TO_INDUCTOR
    )
