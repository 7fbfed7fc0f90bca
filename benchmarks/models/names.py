"""The words of the table; nothing is imported for them, so that the command line can be read before torch is there."""

from __future__ import annotations

from typing import NamedTuple

SUITE = "models"

TRAIN, DECODE = "train", "decode"
STEPS = (TRAIN, DECODE)

# The last is torch.compile with mode="reduce-overhead".
EAGER, COMPILE, GRAPHS = "eager", "compile", "graphs"
RUNS = (EAGER, COMPILE, GRAPHS)

# Weights and all else in bf16, or fp32 weights under autocast to bf16.
BF16, AUTOCAST = "bf16", "autocast"
DTYPES = (BF16, AUTOCAST)

# A row without a time begins with one of these; a wrong row makes the command fail.
WRONG, FAILS, ABSENT, NOTHING = "wrong", "fails", "not here", "nothing to do"


class Key(NamedTuple):
    """The subject of a row."""

    model: str
    dtype: str
    step: str
    run: str
    variant: str
