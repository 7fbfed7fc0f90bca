"""Calls that add a residual behind a dropout of x: the row of the family; `calls/road.py` has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..calls import native, road
from ..calls.known import PLAIN
from ..calls.launch import recorded_of, run
from ..calls.lookup import is_last
from ..calls.randomness import settled
from ..calls.road import calls_of
from ..codegen.parameters import DROPPED
from .eager import Dropout
from .operands import Operands, Options
from .plain import Dropping, full_options, record, record_known

CALLS = calls_of(DROPPED, record=record, looked_up=(5, None))


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
        return record_known((*operands, rng), full, recorded_of(planned), CALLS)
    y, total, *_ = run(planned)
    return y, total


def dropping(dropout: Dropout) -> Dropping:
    """Return the dropout of a call of `plain.normalise`."""
    return CALLS, (dropout.p,), (dropout.rng,)
