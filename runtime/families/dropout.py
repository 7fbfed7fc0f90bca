"""Calls that add a residual behind a dropout of x: the row of the family; `calls/road.py` has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..calls import native, road
from ..calls.known import PLAIN
from ..calls.launch import recorded_of, run
from ..calls.lookup import is_last
from ..calls.outputs import NormGradients, rounded, unpacked_of
from ..calls.randomness import settled
from ..calls.record import Gradients, Recording
from ..calls.road import calls_of, launch_recorded
from ..codegen.parameters import DROPPED, DROPPED_BWD
from ..random_mask import dropped
from . import eager
from .eager import Dropout
from .operands import Operands, Options
from .plain import Dropping, full_options, gradients_first

_BACKWARD = calls_of(DROPPED_BWD, name="dropped_gradients")


def _saved(operands: road.Operands, total: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return residual_out, which the caller holds anyway, weight, and the rng in place of the mask."""
    _, weight, _, _, _, rng = operands
    return total, weight, rng


def _args(options: road.Options, dtypes: tuple[torch.dtype | None, ...], y_dtype: torch.dtype) -> Any:
    norm, _, weight_offset, _, cast, _, p, _ = options
    # With x and y in fp32 nothing was rounded before weight, whatever the dtype of the stored sum.
    return norm, weight_offset, "after_weight" if dtypes[0] is y_dtype is torch.float32 else cast, p, dtypes


def _gradients(
    saved: Sequence[Any],
    args: Any,
    dy: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    due: tuple[bool, ...],
    by_formula: bool,
    _: None,
) -> Gradients:
    total, weight, rng, statistics = saved
    norm, weight_offset, cast, p, dtypes = args
    x_dtype, _, bias_dtype, residual_dtype, x_bias_dtype, _ = dtypes
    # The sum includes x_bias already. An x_bias of zeros makes the kernel sum ddropped before rounding.
    nothing = total.new_zeros(total.shape[-1:], dtype=x_bias_dtype) if due[4] else None
    operands = (dy, total, weight, statistics, nothing, dresidual_out, rng)
    wants = tuple(compress(("ddropped", "dweight", "dbias", "dx", "dx_bias"), due))
    options = (norm, weight_offset, cast, residual_dtype, bias_dtype, wants, p, x_dtype)
    key, grads = None, None
    if dy is None:
        grads = _of_the_sum(dresidual_out, p, rng, nothing)
    elif torch.is_grad_enabled():
        grads = _by_formula(operands, options)
    elif not is_dynamo_compiling():
        key, grads = native.calls.dropped_gradients.gradients(operands, options)
    if grads is None:
        grads = gradients_first(_BACKWARD, key, operands, options, _by_formula)
    return rounded((grads.ddropped, grads.dweight, grads.dbias, grads.dx, grads.dx_bias, None), dtypes, due)


# x, residual and x_bias make the sum.
CALLS = calls_of(
    DROPPED,
    saved=_saved,
    args=_args,
    recording=Recording(launch_recorded, _gradients, sums=(0, 3, 4)),
    looked_up=(5, None),
)


def _by_formula(operands: tuple[Any, ...], options: tuple[Any, ...]) -> NormGradients:
    dy, total, weight, statistics, x_bias, dresidual_out, rng = operands
    *others, p, dropped_dtype = options
    mean, rstd = unpacked_of(total, statistics)
    dropout = Dropout(p, rng, dropped_dtype)
    return eager.plain_gradients((dy, total, weight, rstd, x_bias, dresidual_out), mean, tuple(others), dropout)


def _of_the_sum(dresidual_out: Any, p: float, rng: torch.Tensor, x_bias: torch.Tensor | None) -> NormGradients:
    """Return the gradients if only the sum received one; no gradient of x_bias if x_bias is None."""
    ddropped = dropped(eager.widened(dresidual_out), p, rng)
    return NormGradients(dresidual_out, None, None, None if x_bias is None else eager.over_rows(ddropped), ddropped)


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
        return road.record_known(CALLS, (*operands, rng), full, recorded_of(planned))
    y, total, *_ = run(planned)
    return y, total


def dropping(dropout: Dropout) -> Dropping:
    """Return the dropout of a call of `plain.normalise`."""
    return CALLS, (dropout.p,), (dropout.rng,)
