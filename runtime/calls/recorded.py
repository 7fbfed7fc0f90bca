"""The generated kernels as differentiable functions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress, product
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..codegen.parameters import BACKWARD
from ..codegen.values import Cast
from ..mode_words import word
from ..selection.invariance import is_on
from ..upstream.torch_dynamo import eager_only
from ..upstream.torch_internals import applied, applied_at_once, dispatch_modes
from . import eager, native
from .backend import intercepted
from .first import launched, launched_backward, resolved
from .functional import (
    BACKWARD_OF,
    FORWARD_OF,
    BackwardRows,
    as_operands,
    backward_named,
    backward_rows,
    forward_given,
)
from .known import Found, Key
from .launch import run, run_recorded
from .lookup import Lookup
from .outputs import LayerNormOutput, NormGradients, dtype_of_all, packed_of, unflattened, unpacked
from .public import BackwardOptions, Operands, Options
from .record import arrived_in_memory, records, reentering
from .row_layout import walkable
from .traced import operated

_BACKWARD = backward_rows(BACKWARD, "gradients")

# What a forward pass is told besides its operands: its options, what `run_recorded` is to be given if the call is
# known, and what it is to be known by if it is not.
Told = tuple[Options, "Found | None", "Key | None"]


@eager_only
def normalise(operands: Operands, shape: tuple[int, ...], options: Options) -> Any:
    """Run the kernel that serves arguments which `check_normalised` has passed, recording it where a gradient is due.

    Args:
        operands: x and residual are (..., *shape), the others shape.
        shape: the dimensions that are normalised together.
        options: out_dtype is y's; None is x's, or fp32 where autocast makes it so.

    Returns:
        y, and residual_out where there is a residual; both of x's shape.
    """
    native.start()
    # Resolved here, where autograd sees it, and not by what launches.
    given: Any = tuple(map(resolved, operands))
    rows = as_operands(given, len(shape))
    # Copies may be like the tensors of a call before.
    key, _, found = native.calls.recorded.find(rows, options)
    x, weight, bias, residual, x_bias = rows
    told = (options, found, key)
    total: torch.Tensor | None = None
    if not records(rows):
        y, total = (computed(told, False, rows) if found is None else run(*found))[:2]
    elif residual is None:
        y = _recorded(told, x, weight, bias, x_bias)
    else:
        y, total = _recorded_add(told, *rows)
    y = unflattened(y, shape)
    return y if total is None else (y, unflattened(total, shape))


def computed(told: Told, save_mv: bool, rows: Operands) -> LayerNormOutput:
    """What a forward pass computes, its statistics packed; autograd sees nothing of it."""
    options, found, key = told
    if found is not None:
        return run_recorded(*found)
    given = forward_given(rows, options, save_mv)
    if not intercepted(*rows):
        return launched(options[0], key, given, packed=save_mv)
    y, *others = operated(FORWARD_OF[options[0]], given)
    total = None if given["residual"] is None else others.pop(0)
    return LayerNormOutput(y, total, None, None, packed_of(*others) if save_mv else None)


class _Normalise(torch.autograd.Function):
    """y of x, weight, bias and x_bias; see `normalise`.

    Kept for the backward pass: x, weight, x_bias, and a mean and rstd a row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        told: Told,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        x_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found = told[1]
        if found is None:
            y, _, _, _, statistics = computed(told, True, (x, weight, bias, None, x_bias))
            is_invariant = is_on()
        else:
            y, _, statistics = native.calls.recorded.run_recorded(found)
            is_invariant = found[0].is_invariant
        # One attribute: each that is set takes 0.1 us.
        ctx.told = told[0], None if bias is None else bias.dtype, is_invariant
        ctx.save_for_backward(x, weight, statistics, x_bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (norm, _, weight_offset, _, cast), bias_dtype, is_invariant = ctx.told
        options = (norm, weight_offset, cast, None, bias_dtype, WANTS[ctx.needs_input_grad[1:]])
        gradients = GRADIENTS[is_invariant](options, dy, *ctx.saved_tensors, None)
        # Of as many operands as were passed.
        return None, *gradients[: len(ctx.needs_input_grad) - 1]


class _AddNormalise(torch.autograd.Function):
    """y and residual_out of x, weight, bias, residual and x_bias; see `normalise`.

    Kept for the backward pass: residual_out, which the caller holds anyway, weight, and a mean and rstd a row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        told: Told,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        x_bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        found = told[1]
        if found is None:
            y, total, _, _, statistics = computed(told, True, (x, weight, bias, residual, x_bias))
            is_invariant = is_on()
        else:
            y, total, statistics = native.calls.recorded.run_recorded(found)
            is_invariant = found[0].is_invariant
        # Of fp32 alone nothing was rounded first, whatever the sum is stored in.
        norm, _, weight_offset, _, cast = told[0]
        cast = "after_weight" if x.dtype is y.dtype is torch.float32 else cast
        summed = None if x_bias is None else x_bias.dtype
        ctx.told = (
            *(norm, weight_offset, cast, x.dtype, None if bias is None else bias.dtype, residual.dtype, summed),
            is_invariant,
        )
        # A gradient that did not arrive stays None, rather than becoming M×N zeros.
        ctx.set_materialize_grads(False)
        if not (x.requires_grad or residual.requires_grad or (x_bias is not None and x_bias.requires_grad)):
            ctx.mark_non_differentiable(total)
        ctx.save_for_backward(total, weight, statistics)
        return y, total

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor | None, dresidual_out: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        norm, weight_offset, cast, x_dtype, bias_dtype, residual_dtype, x_bias_dtype, is_invariant = ctx.told
        _, for_x, for_weight, for_bias, for_residual, for_x_bias = ctx.needs_input_grad
        dx, dweight, dbias, dx_bias = dresidual_out, None, None, None
        if dy is not None:
            dx_dtype = x_dtype
            if residual_dtype is not x_dtype:
                dtypes = [dtype for dtype, due in ((x_dtype, for_x), (residual_dtype, for_residual)) if due]
                dx_dtype = dtype_of_all(dtypes) if dtypes else None
            wants = WANTS[for_x or for_residual, for_weight, for_bias, for_x_bias]
            total, weight, statistics = ctx.saved_tensors
            # The sum holds x_bias already; given as zeros, it has the kernel sum dx before it is rounded.
            nothing = total.new_zeros(total.shape[-1:], dtype=x_bias_dtype) if for_x_bias else None
            options = (norm, weight_offset, cast, dx_dtype, bias_dtype, wants)
            dx, dweight, dbias, dx_bias, _ = GRADIENTS[is_invariant](
                options, dy, total, weight, statistics, nothing, dresidual_out
            )
        elif dresidual_out is not None and for_x_bias:
            dx_bias = eager.over_rows(dresidual_out).to(x_bias_dtype)
        return (
            None,
            rounded_to(dx, x_dtype) if for_x else None,
            dweight,
            dbias,
            rounded_to(dx, residual_dtype) if for_residual else None,
            dx_bias,
        )


_recorded, _recorded_add = applied(_Normalise), applied(_AddNormalise)
native.begin(applied_at_once(_Normalise), applied_at_once(_AddNormalise))

# Which gradients are due, from whether those of x (or residual), weight, bias and x_bias are, or of the first two or
# three alone. Nothing is dropped here.
WANTS: dict[tuple[bool, ...], tuple[str, ...]] = {
    due: tuple(compress(NormGradients._fields, due))
    for passed in (2, 3, 4)
    for due in product((False, True), repeat=passed)
}


def rounded_to(gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A gradient in the dtype of what it is of."""
    return gradient if gradient is None or gradient.dtype is dtype else gradient.to(dtype)


class _Gradients(torch.autograd.Function):
    """The backward pass as a function of its own, which torch's operators differentiate."""

    @staticmethod
    def forward(ctx: Any, options: BackwardOptions, *operands: Any) -> tuple[torch.Tensor | None, ...]:
        ctx.options, ctx.is_invariant = options, is_on()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands)
        # Not a named tuple, of which autograd makes no tuple.
        return tuple(gradients_of(options, *operands))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        def compute(*operands: Any) -> NormGradients:
            return eager.plain_gradients_of_packed(operands, ctx.options)

        differentiate = reentering(eager.differentiated) if ctx.is_invariant else eager.differentiated
        return None, *differentiate(compute, ctx.saved_tensors, ctx.needs_input_grad[1:], gradients)


_applied = applied(_Gradients)


def _differentiable_gradients_of(options: BackwardOptions, *operands: Any) -> Any:
    """`gradients_of` where a gradient of the gradient could be asked for."""
    if arrived_in_memory((operands[0], operands[-1])) or is_dynamo_compiling() or dispatch_modes():
        return _applied(options, *operands)
    # Of what has none autograd records what torch's operators do, and not what is done within them.
    return eager.plain_gradients_of_packed(operands, options)


def gradients_of(options: BackwardOptions, *operands: Any) -> NormGradients:
    """Return the gradients that are due. Operands are `BackwardOperands`, whose rstd packs the means too."""
    if torch.is_grad_enabled():
        # Recorded only where a gradient of the gradient could be asked for.
        differentiable: NormGradients = _differentiable_gradients_of(options, *operands)
        return differentiable
    key, found = None, None
    if not is_dynamo_compiling():
        key, found = native.calls.gradients.gradients(operands, options)
    return (
        gradients_first(_BACKWARD, key, operands, options, eager.plain_gradients_of_packed) if found is None else found
    )


def gradients_first(
    rows: BackwardRows,
    key: Key | None,
    operands: tuple[Any, ...],
    options: tuple[Any, ...],
    formula: Callable[[Any, Any], NormGradients],
) -> NormGradients:
    """Return the gradients of a backward pass that is not known.

    Args:
        rows: the rows of its family.
        key: what the pass was looked up by; None if it cannot be known.
        operands: dy first, and dresidual_out, see `rows`.
        options: see `rows`.
        formula: computes the gradients of what kernels cannot read by torch's operators.
    """
    # An eager call's backward pass becomes part of a graph, by compiled autograd say.
    if is_dynamo_compiling() or dispatch_modes():
        return gradients_by_operator(rows, operands, options)
    at = rows.operands.index("dresidual_out")
    dy, dresidual_out = operands[0], operands[at]
    if not arrived_in_memory((dy, dresidual_out)):
        return formula(operands, options)
    copies: Any = (walkable_gradient(dy), *operands[1:at], walkable_gradient(dresidual_out), *operands[at + 1 :])
    if copies[0] is not dy or copies[at] is not dresidual_out:
        # Copies may be like the gradients of a call before.
        look_up: Lookup = getattr(native.calls, rows.look_up)
        key, found = look_up.gradients(copies, options)
        if found is not None:
            return found
    return launched_backward(options[0], key, backward_named(rows, copies, options), packed=True)


# By whether the call was batch invariant.
GRADIENTS = (gradients_of, reentering(gradients_of))


def walkable_gradient(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient that kernels can read, None if none arrived."""
    return None if gradient is None else walkable(resolved(gradient))


def gradients_by_operator(rows: BackwardRows, operands: tuple[Any, ...], options: tuple[Any, ...]) -> NormGradients:
    """`gradients_of` where something sees operators, and is to see this one."""
    given = backward_named(rows, operands, options)
    for name in ("dy", "dresidual_out"):
        given[name] = walkable_gradient(given[name])
    x = given["x"]
    given["mean"], given["rstd"] = (
        None if statistic is None else statistic.view(x.shape[:-1])
        for statistic in unpacked(given["rstd"], x.numel() // x.shape[-1])
    )
    wants, given["wants"] = given["wants"], list(given["wants"])
    given["cast"] = word(Cast, "cast", given["cast"]).value
    found = iter(operated(BACKWARD_OF[options[0]], given))
    return NormGradients(*[next(found) if name in wants else None for name in NormGradients._fields])
