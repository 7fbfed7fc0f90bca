"""A residual add and the norm behind it, launched as one kernel and recorded as two functions.

A model's forward adds first, and calls the norm next. The kernel runs at the sum and computes both results; autograd
records each where the forward asks for it. Hooks on the sum, and `retain_grad`, see the gradient that torch's operators
would give the sum.
"""

from __future__ import annotations

from typing import Any

import torch

from ..calls import native
from ..calls.backend import intercepted, is_served
from ..calls.known import PlannedCall
from ..calls.launch import Recorded, recorded_of, run
from ..calls.outputs import rounded
from ..calls.record import records
from ..calls.road import as_operands, prepared
from ..selection.invariance import is_on
from ..upstream.torch_internals import applied_at_once
from .operands import Operands, Options
from .plain import CALLS, GRADIENTS, WANTS, full_options

# y, and the statistics of the rows, or None if autograd does not record the norm.
Ahead = tuple[torch.Tensor, "torch.Tensor | None"]


def add_ahead(operands: Operands, options: Options) -> tuple[torch.Tensor, Ahead] | None:
    """Add a residual, and compute the norm of the sum for a later call of `norm_of_sum`.

    Args:
        operands: x and residual, (..., N) of fp16, bf16 or fp32; weight and bias, (N,) or None; no x_bias.
        options: the norm's word, and its other options.

    Returns:
        The sum in residual's dtype, differentiable in x and residual, and the argument `ahead` of `norm_of_sum`. None
        if no kernel can read these tensors in place; nothing was computed then.

    Raises:
        NormforgeError: no kernel can serve the first call of its kind; an instance is missing, for example.
    """
    result: Any = native.calls.added_ahead.normalise(operands, options)
    if result is None:
        if not _served(operands, options):
            return None
        is_recorded = records(operands)
        planned = _planned(operands, options, is_recorded)
        result = _record(operands, options, recorded_of(planned)) if is_recorded else run(planned)
    first, second, *_ = result
    # A call without a gradient returns y and the sum.
    return (first, second) if isinstance(second, tuple) else (second, (first, None))


def _planned(operands: Operands, options: Options, is_recorded: bool) -> PlannedCall:
    """Check and plan a call that is not known, and make its kind known."""
    key, _, _ = native.calls.added_ahead.find(operands, options)
    return prepared(CALLS, operands, full_options(operands, options, saves=is_recorded), key)


def norm_of_sum(
    options: Options, ahead: Ahead, total: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Record the norm of a sum that `add_ahead` made with statistics.

    Returns:
        y, and an alias of the sum. The norm's backward kernel adds the alias's gradient to dx; autograd adds the
        gradient of `total` after the kernel.
    """
    both: tuple[torch.Tensor, torch.Tensor] = _apply_norm((options, ahead), total, weight, bias)
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
    if both is None and _served(operands, options):
        both = _record(operands, options, recorded_of(_planned(operands, options, True)))
    return both


def _served(operands: Operands, options: Options) -> bool:
    """Return True if a kernel reads the tensors without a copy, and no dispatch mode has to see the call."""
    norm, _, weight_offset, _, _ = options
    x, weight, bias, _, _ = operands
    return (
        is_served(operands)
        and x.numel() > 0
        and not intercepted(*operands)
        and all(each is None or (each.device == x.device and not each.is_neg()) for each in operands)
        and all(each is None or each.shape == x.shape[-1:] for each in (weight, bias))
        and (weight_offset == 0.0 or norm == "rms")
        and all(row is each for row, each in zip(as_operands(operands, 1), operands, strict=True))
    )


class _Sum(torch.autograd.Function):
    """The sum of x and residual. Autograd does not know y and the statistics yet, and nothing is saved."""

    @staticmethod
    def forward(ctx: Any, launched: tuple[torch.Tensor], x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        ctx.dtypes = (x.dtype, residual.dtype)
        return launched[0]

    @staticmethod
    def backward(ctx: Any, dtotal: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *rounded((dtotal, dtotal), ctx.dtypes, ctx.needs_input_grad[1:])


class _NormOfSum(torch.autograd.Function):
    """y of a sum, and an alias of the sum. The backward pass saves the sum, weight, and a mean and rstd per row."""

    @staticmethod
    def forward(
        ctx: Any,
        args: tuple[Options, Ahead],
        total: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options, (y, statistics) = args
        ctx.is_invariant = is_on()
        # The alias shares memory and version counter with total, so autograd notices a write to either.
        again = total.detach()
        ctx.args = options, None if bias is None else bias.dtype
        # A gradient that did not arrive stays None, rather than becoming M×N zeros.
        ctx.set_materialize_grads(False)
        if not total.requires_grad:
            ctx.mark_non_differentiable(again)
        ctx.save_for_backward(again, weight, statistics)
        return y, again

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None, dagain: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:
            return None, dagain, None, None
        (norm, _, weight_offset, _, cast), bias_dtype = ctx.args
        due = (*ctx.needs_input_grad[1:], False)
        options = (norm, weight_offset, cast, None, bias_dtype, WANTS[due])
        return None, *GRADIENTS[ctx.is_invariant](options, dy, *ctx.saved_tensors, None, dagain)[:3]


_apply_sum, _apply_norm = applied_at_once(_Sum), applied_at_once(_NormOfSum)


def _record(operands: Operands, options: Options, recorded: Recorded) -> Any:
    """Record the sum of a call, or the norm if there is no residual."""
    y, total, statistics, _ = recorded
    x, weight, bias, residual, _ = operands
    if total is None:
        return norm_of_sum(options, (y, statistics), x, weight, bias)
    return _apply_sum((total,), x, residual), (y, statistics)


native.record_by("added_ahead", _record)
