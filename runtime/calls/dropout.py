"""A residual added to what a dropout leaves of x, and the norm of the sum: launched, and recorded by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..random_mask import dropped
from ..selection import dispatch
from ..selection.batch import batch_invariant
from ..selection.invariance import is_on
from ..upstream.torch_autograd import applied, applied_at_once
from ..upstream.torch_dynamo import eager_only
from ..upstream.torch_internals import dispatch_modes
from . import eager, known
from .eager import Dropout
from .first import resolved
from .functional import (
    BACKWARD_OF,
    FORWARD_OF,
    any_requires_gradient,
    as_operands,
    backward_named,
    forward_given,
    taken,
)
from .known import PLAIN, UNREADABLE
from .outputs import LayerNormOutput, NormGradients, unflattened
from .recorded import arrived_in_memory, rounded_to, walkable_gradient
from .straight import DEFAULT_EPS, Operands, Options, layernorm2d_bwd, layernorm2d_fwd, rmsnorm2d_bwd, rmsnorm2d_fwd

_FORWARD: dict[str, Callable[..., LayerNormOutput]] = {"layer": layernorm2d_fwd, "rms": rmsnorm2d_fwd}
_BACKWARD: dict[str, Callable[..., NormGradients]] = {"layer": layernorm2d_bwd, "rms": rmsnorm2d_bwd}


def _key(operands: Operands, options: Options) -> tuple[Any, ...]:
    """Return the key under which calls that were checked are kept among the plans; such a kind has no plan."""
    return ("dropped add", operands[0].shape[-1], *[operand is None for operand in operands], *options)


@eager_only
def was_checked(operands: Operands, normalized_shape: Sequence[int] | None, options: Options) -> Options | None:
    """The options of a call, None's stead taken, if one like it was checked before: nothing of it is refused or copied.

    None if there was none.
    """
    if options[1] is None and options[0] == "rms":
        options = (options[0], DEFAULT_EPS, *options[2:])
    try:
        x, residual = operands[0], operands[3]
        is_known = (
            residual is not None
            and (
                normalized_shape is None or (normalized_shape == x.shape[-1:] and normalized_shape[0].__class__ is int)
            )
            and any(kind.fits(*kind.present(operands)) for kind in dispatch.plans.get(_key(operands, options), ()))
            and x.shape == residual.shape
            and x.is_contiguous()
            and residual.is_contiguous()
            and forward_ad._current_level < 0
            and not dispatch_modes()
            and options[1].__class__ is options[2].__class__ is float
        )
    except UNREADABLE:
        return None
    return options if is_known else None


def remember(operands: Operands, options: Options) -> None:
    """Have `was_checked` know calls like one that was checked, if its tensors are launched as they are."""
    x, residual = operands[0], operands[3]
    rows = [operand is x or operand is residual for operand in operands]
    for operand, is_rows in zip(operands, rows, strict=True):
        if operand is not None and not (
            operand.__class__ in PLAIN
            and not operand.is_neg()
            and operand.is_contiguous()
            and (is_rows or operand.dim() == 1)
        ):
            return
    free = [x.dim() - 1 if is_rows else 0 for is_rows in rows]
    known.remember(dispatch.plans, _key(operands, options), operands, free, (), None)


def normalise_checked(operands: Operands, options: Options, dropout: Dropout) -> Any:
    """What `normalise` returns of a call of which `was_checked` is true."""
    if torch.is_grad_enabled() and any_requires_gradient(operands):
        return _apply((options, dropout.p), *operands, dropout.rng)
    return _launched(operands, options, dropout, save_mv=False)[:2]


def normalise(operands: Operands, shape: tuple[int, ...], options: Options, dropout: Dropout) -> Any:
    """What `recorded.normalise` returns where a dropout comes before the residual; arguments were checked.

    Args:
        operands: x and residual are (..., *shape), the others shape.
        shape: the dimensions that are normalised together.
        options: see `straight.Options`.
        dropout: what is dropped.

    Returns:
        y and residual_out, of x's shape.
    """
    given: Any = tuple(map(resolved, operands))
    rows = as_operands(given, len(shape))
    if torch.is_grad_enabled() and any_requires_gradient(rows):
        y, total = _recorded((options, dropout.p), *rows, dropout.rng)
    else:
        y, total = _launched(rows, options, dropout, save_mv=False)[:2]
    return unflattened(y, shape), unflattened(total, shape)


def _launched(rows: Operands, options: Options, dropout: Dropout, *, save_mv: bool) -> LayerNormOutput:
    given = forward_given(rows, options, save_mv) | {"dropout_p": dropout.p, "dropout_rng": dropout.rng}
    return _FORWARD[options[0]](**taken(FORWARD_OF[options[0]], given))


class _DropAddNormalise(torch.autograd.Function):
    """y and residual_out; see `normalise`.

    Kept for the backward pass: residual_out, which the caller holds anyway, weight, a mean and rstd a row, and the seed
    and the offset that the mask is drawn by once more.
    """

    @staticmethod
    def forward(ctx: Any, told: tuple[Options, float], *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        options, p = told
        *operands, rng = given
        rows: Any = tuple(operands)
        x, weight, bias, residual, x_bias = rows
        y, total, _, mean, rstd = _launched(rows, options, Dropout(p, rng), save_mv=True)
        assert total is not None
        # Of fp32 alone nothing was rounded first, whatever the sum is stored in.
        norm, _, weight_offset, _, cast = options
        cast = "after_weight" if x.dtype is y.dtype is torch.float32 else cast
        ctx.told = norm, weight_offset, cast, p
        ctx.is_invariant = is_on()
        ctx.dtypes = [None if operand is None else operand.dtype for operand in (x, bias, residual, x_bias)]
        # A gradient that did not arrive stays None, rather than becoming M×N zeros.
        ctx.set_materialize_grads(False)
        if not any(operand is not None and operand.requires_grad for operand in (x, residual, x_bias)):
            ctx.mark_non_differentiable(total)
        ctx.save_for_backward(total, weight, mean, rstd, rng)
        return y, total

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor | None, dresidual_out: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if ctx.is_invariant and not is_on():
            with batch_invariant():
                return _DropAddNormalise.backward(ctx, dy, dresidual_out)
        found = _gradients(ctx, dy, dresidual_out)
        _, for_x, _, _, for_residual, _, _ = ctx.needs_input_grad
        x_dtype, _, residual_dtype, _ = ctx.dtypes
        return (
            None,
            rounded_to(found.ddropped, x_dtype) if for_x else None,
            found.dweight,
            found.dbias,
            rounded_to(found.dx, residual_dtype) if for_residual else None,
            found.dx_bias,
            None,
        )


_recorded, _apply = applied(_DropAddNormalise), applied_at_once(_DropAddNormalise)


def _gradients(ctx: Any, dy: torch.Tensor | None, dresidual_out: torch.Tensor | None) -> NormGradients:
    norm, weight_offset, cast, p = ctx.told
    total, weight, mean, rstd, rng = ctx.saved_tensors
    x_dtype, bias_dtype, residual_dtype, x_bias_dtype = ctx.dtypes
    _, for_x, for_weight, for_bias, for_residual, for_x_bias, _ = ctx.needs_input_grad
    if dy is None:
        return _of_the_sum(dresidual_out, p, rng, x_bias_dtype if for_x_bias else None)
    names = {"dx": for_residual, "dweight": for_weight, "dbias": for_bias, "dx_bias": for_x_bias, "ddropped": for_x}
    wants = tuple([name for name, due in names.items() if due])
    # The sum holds x_bias already; given as zeros, it has the kernel sum ddropped before it is rounded.
    nothing = total.new_zeros(total.shape[-1:], dtype=x_bias_dtype) if for_x_bias else None
    dropout = Dropout(p, rng, x_dtype)
    operands = (dy, total, weight, rstd, nothing, dresidual_out)
    options = (norm, weight_offset, cast, residual_dtype, bias_dtype, wants)
    # A gradient of the gradient is of torch's operators, and so are several gradients at once.
    if torch.is_grad_enabled() or not arrived_in_memory((dy, dresidual_out)):
        return eager.plain_gradients(operands, mean, options, dropout)
    given = backward_named(operands, options)
    for name in ("dy", "dresidual_out"):
        given[name] = walkable_gradient(given[name])
    given |= {"mean": mean, "dropout_p": p, "dropout_rng": rng, "dropped_dtype": x_dtype}
    return _BACKWARD[norm](**taken(BACKWARD_OF[norm], given))


def _of_the_sum(
    dresidual_out: torch.Tensor | None, p: float, rng: torch.Tensor, x_bias_dtype: torch.dtype | None
) -> NormGradients:
    """Where a gradient arrived for the sum alone, if any did."""
    if dresidual_out is None:
        return NormGradients(None, None, None, None)
    ddropped = dropped(eager.widened(dresidual_out), p, rng)
    dx_bias = None if x_bias_dtype is None else eager.over_rows(ddropped).to(x_bias_dtype)
    return NormGradients(dresidual_out, None, None, dx_bias, ddropped)
