"""The cost of batch invariance for many rows: no kernel for odd rows, and none that spreads long ones."""

from __future__ import annotations

from ..cells import Method, Suite, Task
from .batch_invariant import MANY, cells_of

# Lengths of models, where the kernel is the default's and the cost should be none; an odd one, for which there is no
# `window`; and those that sm_90's table spreads: backward from 8193 on, LayerNorm from 32769 and RMSNorm from 65537.
_FUSED = (4096, 4099, 16384, 65536)
_LENGTHS = {
    Task.FORWARD: (128, 1024, 4096, 4099, 8192, 16384, 65536, 131072),
    Task.ADD: (1024, *_FUSED),
    Task.QUANT: _FUSED,
    Task.ADD_QUANT: _FUSED,
    Task.BACKWARD: (1024, *_FUSED),
}
# The first that is many, and enough for a GPU of any size.
_ROWS = (257, 4096)
# x of half a GiB says no more than one of a quarter.
_MOST = 2**28

SUITE = Suite(
    "batch-invariant-many", "Batch invariance, many rows", Method.COLD, cells_of(MANY, _LENGTHS, _ROWS, _MOST)
)
