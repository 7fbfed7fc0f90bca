"""A residual add and the norm behind it, launched as one kernel and recorded as two functions.

A model's forward adds first, and calls the norm next. The kernel runs at the sum and computes both results; autograd
records each where the forward asks for it. Hooks on the sum, and `retain_grad`, see the gradient that torch's operators
would give the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..calls import native
from ..calls.backend import is_served
from ..calls.launch import Recorded, recorded_of, run
from ..calls.outputs import dtypes_of, rounded
from ..calls.record import BackwardPass, Gradients, Launched, Recording, record_at_once
from ..calls.road import ready
from ..selection.invariance import is_on
from .operands import Operands, Options
from .plain import CALLS, WANTS, full_options, gradients_of

# y, and the statistics of the rows, or None if autograd does not record the norm.
Ahead = tuple[torch.Tensor, "torch.Tensor | None"]


def add_ahead(operands: Operands, options: Options) -> tuple[torch.Tensor, Ahead] | None:
    """Add a residual, and compute the norm of the sum for a later call of `norm_of_sum`.

    Args:
        operands: x and residual, (..., N) of fp16, bf16 or fp32; weight and bias, (N,) or None; no x_bias.
        options: the norm's word, and its other options.

    Returns:
        The sum in residual's dtype, differentiable in x and residual, and the argument `ahead` of `norm_of_sum`. None
        if no kernel can read x in place; nothing was computed then.

    Raises:
        NormforgeError: no kernel can serve the first call of its kind; an instance is missing, for example.
    """
    result: Any = native.calls.added_ahead.normalise(operands, options)
    if result is None:
        result = _launched(operands, options)
    if result is None:
        return None
    first, second, *_ = result
    # A call without a gradient returns y and the sum.
    return (first, second) if isinstance(second, tuple) else (second, (first, None))


def _launched(operands: Operands, options: Options) -> Any:
    """Launch a call that is not known, recorded if a gradient is due, and make its kind known.

    Return None if no kernel serves the call, if something has to see operators, or if x would be copied.
    """
    if not (is_served(operands) and operands[0].numel()):
        return None
    rows, settled, planned = ready(CALLS, operands, full_options(operands, options))
    if planned is None or rows[0] is not operands[0]:
        return None
    return _record(rows, options, recorded_of(planned)) if settled[-1] else run(planned)


def norm_of_sum(
    options: Options, ahead: Ahead, total: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Record the norm of a sum that `add_ahead` made with statistics.

    Returns:
        y, and an alias of the sum. The norm's backward kernel adds the alias's gradient to dx; autograd adds the
        gradient of `total` after the kernel.
    """
    both: tuple[torch.Tensor, torch.Tensor] = record_at_once((_NORM, (options, ahead)), total, weight, bias)
    return both


def norm_of_summand(operands: Operands, options: Options) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Compute and record a norm whose input is an operand of a later sum.

    Args:
        operands: x, which requires a gradient; weight and bias; no residual and no x_bias.
        options: the norm's word, and its other options.

    Returns:
        y, and an alias of x for the sum, as from `norm_of_sum`. None if no kernel can read the tensors in place.
    """
    both: tuple[torch.Tensor, torch.Tensor] | None
    both = native.calls.added_ahead.normalise(operands, options, operands[0].shape[-1:])
    return _launched(operands, options) if both is None else both


def _launch_sum(call: tuple[torch.Tensor], operands: Sequence[Any]) -> Launched:
    # Autograd does not know y and the statistics yet, and nothing is saved.
    return call[0], None, (), dtypes_of(operands), is_on()


def _sum_gradients(call: BackwardPass) -> Gradients:
    return rounded((call.dy, call.dy), call.args, call.due)


def _launch_norm(call: tuple[Options, Ahead], operands: Sequence[Any]) -> Launched:
    options, (y, statistics) = call
    total, weight, bias = operands
    # The alias shares memory and version counter with total, so autograd notices a write to either.
    again = total.detach()
    return y, again, (again, weight, statistics), (options, None if bias is None else bias.dtype), is_on()


def _norm_gradients(call: BackwardPass) -> Gradients:
    if call.dy is None:
        return call.dresidual_out, None, None
    (norm, _, weight_offset, _, cast), bias_dtype = call.args
    options = (norm, weight_offset, cast, None, bias_dtype, WANTS[call.due])
    return gradients_of(options, call.dy, *call.saved, None, call.dresidual_out)[:3]


_SUM, _NORM = Recording(_launch_sum, _sum_gradients), Recording(_launch_norm, _norm_gradients, sums=(0,))


def _record(operands: Operands, options: Options, recorded: Recorded) -> Any:
    """Record the sum of a call, or the norm if there is no residual."""
    y, total, statistics, _ = recorded
    x, weight, bias, residual, _ = operands
    if total is None:
        return norm_of_sum(options, (y, statistics), x, weight, bias)
    return record_at_once((_SUM, (total,)), x, residual), (y, statistics)


native.record_by("added_ahead", _record)
