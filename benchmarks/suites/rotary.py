"""Norms and rotary embedding of q and k, 32 and 8 heads of a packed qkv, of many tokens."""

from __future__ import annotations

from itertools import product

from ..cells import Method, Norm, RotaryCell, Suite, Task

_TOKENS = (256, 1024, 4096, 16384)
# Most models', and Gemma 3's.
_LENGTHS = (128, 256)


def cells(task: Task, group: str, tokens: tuple[int, ...]) -> tuple[RotaryCell, ...]:
    """Return a cell for each length of a head and each number of tokens."""
    return tuple(
        RotaryCell(task, Norm.RMS, m * RotaryCell.heads[0], n, group=group) for n, m in product(_LENGTHS, tokens)
    )


SUITE = Suite(
    "rotary",
    "Norms of q and k with RoPE",
    Method.COLD,
    (*cells(Task.ROTARY, "forward", _TOKENS), *cells(Task.ROTARY_BACKWARD, "backward", _TOKENS)),
    along="m",
)
