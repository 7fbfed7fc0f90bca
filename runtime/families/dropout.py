"""Known calls that add a residual behind a dropout of x; `plain.py` has the row of the family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..calls import native, road
from ..calls.known import PLAIN
from ..calls.launch import recorded_of, run
from ..calls.lookup import is_last
from ..calls.randomness import settled
from .operands import Operands, Options
from .plain import DROPS, full_options, record_known


def normalise_known(
    operands: Operands, normalized_shape: Sequence[int] | None, options: Options, asked: tuple[Any, Any]
) -> Any:
    """Return what `plain.normalise` returns of a known call, or None; `asked` is dropout_p and dropout_rng as passed.

    Nothing is drawn for a call that is not known, because it may be refused.
    """
    x, *_ = operands
    p, rng = asked
    if p.__class__ is not float or p == 0.0 or (isinstance(rng, torch.Tensor) and rng.__class__ not in PLAIN):
        return None
    full = full_options(operands, options, p)
    _, is_recorded, planned = native.calls.dropped.find(operands, full)
    if planned is None or not (normalized_shape is None or is_last(normalized_shape, x.shape)):
        return None
    _, rng = settled(p, rng, x)
    planned = road.with_rng(planned, rng)
    if is_recorded:
        return record_known(DROPS, (*operands, rng), full, recorded_of(planned))
    y, total, *_ = run(planned)
    return y, total
