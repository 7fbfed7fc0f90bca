"""A residual add and the norm behind it, launched as one kernel and recorded as two functions.

A forward adds first, and calls the norm next. The kernel runs at the sum, and makes both; autograd records each where
the forward asks for it. So hooks on the sum, and `retain_grad`, see the gradient that torch's operators give the sum.
"""

from __future__ import annotations

from typing import Any

import torch

from ..calls import native
from ..calls.backend import backend, intercepted, left_to_torch
from ..calls.known import Found
from ..calls.launch import run
from ..calls.record import records
from ..calls.road import prepared
from ..dtypes import FLOATS
from ..selection.invariance import is_on
from ..upstream.torch_internals import applied_at_once
from .plain import CALLS, GRADIENTS, WANTS, as_operands, rounded_to, told_of
from .public import Operands, Options

# y, and the statistics of the rows where autograd records the norm; None in their place where it does not.
Ahead = tuple[torch.Tensor, "torch.Tensor | None"]


def add_ahead(operands: Operands, options: Options) -> tuple[torch.Tensor, Ahead] | None:
    """Add a residual, and compute the norm of the sum for a later call of `norm_of_sum`.

    Args:
        operands: x and residual, (..., N) of fp16, bf16 or fp32; weight and bias, (N,) or None; no x_bias.
        options: the norm's word, and what is told besides.

    Returns:
        The sum in residual's dtype, differentiable in x and residual, and what `norm_of_sum` is to be given. None where
        no kernel serves tensors like these as they are: nothing was done then.

    Raises:
        NormforgeError: the first call of its kind cannot be served, for want of an instance, say.
    """
    key, is_recorded, found = native.calls.recorded.find(operands, options)
    if found is None:
        if not _served(operands, options):
            return None
        is_recorded = records(operands)
        found = prepared(CALLS, operands, told_of(operands, options, is_recorded), key)
    x, _, _, residual, _ = operands
    if is_recorded:
        made: list[Ahead] = []
        total: torch.Tensor = _apply_sum((found, made), x, residual)
        return total, made[0]
    y, sums, *_ = run(*found)
    assert sums is not None
    return sums, (y, None)


def norm_of_sum(
    options: Options, ahead: Ahead, total: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Record the norm of a sum that `add_ahead` made with statistics.

    Returns:
        y, and a tensor that is the sum: a gradient that arrives at it is added to dx in the norm's backward kernel,
        where one that arrives at `total` is added behind it, by autograd.
    """
    both: tuple[torch.Tensor, torch.Tensor] = _apply_norm((options, ahead), total, weight, bias)
    return both


def norm_of_summand(operands: Operands, options: Options) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Compute and record a norm whose input is an operand of a later sum.

    Args:
        operands: x, which requires a gradient; weight and bias; no residual and no x_bias.
        options: the norm's word, and its other options.

    Returns:
        y, and x for the sum, see `norm_of_sum`. None where no kernel serves the tensors as they are.
    """
    key, _, found = native.calls.recorded.find(operands, options)
    if found is None:
        if not _served(operands, options):
            return None
        found = prepared(CALLS, operands, told_of(operands, options, True), key)
    with torch.no_grad():
        y, _, statistics = native.calls.recorded.run_recorded(found)
    return norm_of_sum(options, (y, statistics), *operands[:3])


def _served(operands: Operands, options: Options) -> bool:
    """Whether a kernel serves tensors as they are, with no copy and nobody else who has to see what runs."""
    norm, _, weight_offset, _, _ = options
    x, weight, bias, _, _ = operands
    there = [each for each in operands if each is not None]
    return (
        x.numel() > 0
        and all(each.dtype in FLOATS and each.layout is torch.strided and not each.is_neg() for each in there)
        and all(each.device == x.device for each in there)
        and all(each is None or each.shape == x.shape[-1:] for each in (weight, bias))
        and (weight_offset == 0.0 or norm == "rms")
        and backend(x) == "kernel"
        and not left_to_torch(operands)
        and not intercepted(*operands)
        and all(row is each for row, each in zip(as_operands(operands, 1), operands, strict=True))
    )


class _Sum(torch.autograd.Function):
    """The sum of x and residual; y and the statistics beside it are not autograd's yet. Nothing is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        told: tuple[Found, list[Ahead]],
        x: torch.Tensor,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        found, made = told
        y, total, statistics = native.calls.recorded.run_recorded(found)
        made.append((y, statistics))
        ctx.dtypes = (x.dtype, residual.dtype)
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, dtotal: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, for_x, for_residual = ctx.needs_input_grad
        x_dtype, residual_dtype = ctx.dtypes
        return (
            None,
            rounded_to(dtotal, x_dtype) if for_x else None,
            rounded_to(dtotal, residual_dtype) if for_residual else None,
        )


class _NormOfSum(torch.autograd.Function):
    """y of a sum, and the sum once more; kept are the sum, weight, and a mean and rstd a row."""

    @staticmethod
    def forward(
        ctx: Any,
        told: tuple[Options, Ahead],
        total: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options, (y, statistics) = told
        ctx.is_invariant = is_on()
        # Of one memory and one version with total: what is written to either is found out of both.
        again = total.detach()
        ctx.told = options, None if bias is None else bias.dtype
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
        (norm, _, weight_offset, _, cast), bias_dtype = ctx.told
        due = (*ctx.needs_input_grad[1:], False)
        options = (norm, weight_offset, cast, None, bias_dtype, WANTS[due])
        return None, *GRADIENTS[ctx.is_invariant](options, dy, *ctx.saved_tensors, None, dagain)[:3]


_apply_sum, _apply_norm = applied_at_once(_Sum), applied_at_once(_NormOfSum)
