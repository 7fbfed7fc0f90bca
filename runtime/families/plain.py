"""Differentiable calls of the norms alone: the row of the family; `calls/road.py` has the rest.

Such a call is two tuples, `operands.Operands` and `operands.Options`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, product
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..calls import native, road
from ..calls.backend import is_served
from ..calls.first import launched, resolved
from ..calls.launch import Recorded, recorded_of, run
from ..calls.native import is_last
from ..calls.outputs import NormGradients, dtype_of_all, dtypes_of, rounded, rounded_to, unflattened, unpacked
from ..calls.plan import PLAIN, Key
from ..calls.randomness import settled
from ..calls.record import BackwardPass, Gradients, Launched, Recording, arrived_in_memory, record_at_once, reentering
from ..calls.road import FamilyCalls, as_operands, operate, ready
from ..calls.row_layout import walkable
from ..calls.traced import operated
from ..codegen.parameters import BACKWARD, DROPPED, DROPPED_BWD, FORWARD
from ..codegen.values import Cast
from ..dtypes import word
from ..random_mask import dropped
from ..selection.invariance import is_on
from ..upstream.torch_internals import applied, applied_at_once, dispatch_modes, eager_only
from . import eager
from .operands import Operands, Options

_BACKWARD = road.calls_of(BACKWARD, name="gradients")
_DROPPED_BACKWARD = road.calls_of(DROPPED_BWD, name="dropped_gradients")


@eager_only
def normalise(operands: Operands, shape: tuple[int, ...], options: Options, drops: eager.Dropout | None = None) -> Any:
    """Run the kernel that serves arguments which `check_normalised` has passed, recording it where a gradient is due.

    Args:
        operands: x and residual are (..., *shape), the others shape.
        shape: the dimensions that are normalised together.
        options: out_dtype is y's; None is x's, or fp32 where autocast makes it so.
        drops: the dropout of x; None for none.

    Returns:
        y, and residual_out where there is a residual; both of x's shape.
    """
    rows = as_operands(operands, len(shape))
    calls, p, rng = (CALLS, (), ()) if drops is None else (DROPS, (drops.p,), (drops.rng,))
    result = road.normalise(calls, (*rows, *rng), full_options(rows, options, *p))
    if not isinstance(result, tuple):
        return unflattened(result, shape)
    return tuple([unflattened(each, shape) for each in result])


def full_options(operands: road.Operands, options: Options, *p: float, saves: bool | None = None) -> road.Options:
    """Return the options of a call as its family's row has them; p is the probability of a dropout, if there is one."""
    return (*options, "none" if operands[3] is None else "pre_add_store", *p, saves)


def normalise_traced(operands: Operands, dimensions: int, options: Options, drops: eager.Dropout | None = None) -> Any:
    """Run `normalise` as one operator, behind the views and copies that the operator needs."""
    rows = as_operands(operands, dimensions)
    # The condition of `records`, whose names TorchDynamo would guard.
    saves = torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in rows)
    calls, p, rng = (CALLS, (), ()) if drops is None else (DROPS, (drops.p,), (drops.rng,))
    y, total, _ = operate(calls, (*rows, *rng), full_options(rows, options, *p, saves=saves))
    shape = operands[0].shape
    return y.view(shape) if total is None else (y.view(shape), total.view(shape))


class _Normalise(torch.autograd.Function):
    """y of x, weight, bias and x_bias, without a residual.

    The backward pass saves x, weight, x_bias, and a mean and rstd per row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[road.Options, Recorded | None],
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        x_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        options, recorded = call
        y, _, statistics, is_invariant = recorded or road.run_seen(CALLS, (x, weight, bias, None, x_bias), options)
        # One attribute, because setting each takes 0.1 us.
        ctx.args = options, None if bias is None else bias.dtype, is_invariant
        ctx.save_for_backward(x, weight, statistics, x_bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (norm, _, weight_offset, _, cast, *_), bias_dtype, is_invariant = ctx.args
        options = (norm, weight_offset, cast, None, bias_dtype, WANTS[ctx.needs_input_grad[1:]])
        gradients = GRADIENTS[is_invariant](options, dy, *ctx.saved_tensors, None)
        # One gradient per operand that was passed.
        return None, *gradients[: len(ctx.needs_input_grad) - 1]


class _AddNormalise(torch.autograd.Function):
    """y and residual_out of x, weight, bias, residual and x_bias, and of the rng of a dropout of x, if there is one.

    The backward pass saves residual_out, which the caller holds anyway, weight, a mean and rstd per row, and rng in
    place of the mask.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[FamilyCalls, road.Options, Recorded | None],
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        x_bias: torch.Tensor | None,
        *rng: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        calls, options, recorded = call
        y, total, statistics, is_invariant = recorded or road.run_seen(
            calls, (x, weight, bias, residual, x_bias, *rng), options
        )
        # With x and y in fp32 nothing was rounded before weight, whatever the dtype of the stored sum.
        norm, _, weight_offset, _, cast, *others = options
        cast = "after_weight" if x.dtype is y.dtype is torch.float32 else cast
        summed = None if x_bias is None else x_bias.dtype
        ctx.args = (
            *(norm, weight_offset, cast, x.dtype, None if bias is None else bias.dtype, residual.dtype, summed),
            is_invariant,
            # The probability of a dropout stands between fadd and whether statistics are saved.
            others[1:-1] if rng else None,
        )
        # A gradient that did not arrive stays None, rather than becoming M×N zeros.
        ctx.set_materialize_grads(False)
        if not (x.requires_grad or residual.requires_grad or (x_bias is not None and x_bias.requires_grad)):
            ctx.mark_non_differentiable(total)
        ctx.save_for_backward(total, weight, statistics, *rng)
        return y, total

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor | None, dresidual_out: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        norm, weight_offset, cast, x_dtype, bias_dtype, residual_dtype, x_bias_dtype, is_invariant, p = ctx.args
        _, for_x, for_weight, for_bias, for_residual, for_x_bias, *_ = ctx.needs_input_grad
        total, weight, statistics, *rng = ctx.saved_tensors
        dx, dweight, dbias, dx_bias, of_x = dresidual_out, None, None, None, dresidual_out
        if dy is not None:
            dx_dtype = residual_dtype
            if p:
                wants = WANTS[for_residual, for_weight, for_bias, for_x_bias, for_x]
                dropping = *p, x_dtype
            else:
                wants, dropping = WANTS[for_x or for_residual, for_weight, for_bias, for_x_bias], ()
                if for_x and residual_dtype is not x_dtype:
                    dx_dtype = dtype_of_all((x_dtype, residual_dtype)) if for_residual else x_dtype
            # The sum includes x_bias already. An x_bias of zeros has the kernel sum x's gradient before rounding.
            nothing = total.new_zeros(total.shape[-1:], dtype=x_bias_dtype) if for_x_bias else None
            options = (norm, weight_offset, cast, dx_dtype, bias_dtype, wants, *dropping)
            dx, dweight, dbias, dx_bias, ddropped = GRADIENTS[is_invariant](
                options, dy, total, weight, statistics, nothing, dresidual_out, *rng
            )
            of_x = ddropped if p else dx
        elif dresidual_out is not None:
            of_x = dropped(eager.widened(dresidual_out), *p, *rng) if p else dresidual_out
            dx_bias = eager.over_rows(of_x).to(x_bias_dtype) if for_x_bias else None
        return (
            None,
            rounded_to(of_x, x_dtype) if for_x else None,
            dweight,
            dbias,
            rounded_to(dx, residual_dtype) if for_residual else None,
            dx_bias,
            # For rng; autograd takes no notice of a None too many.
            None,
        )


def _recording(plain: Callable[..., Any], add: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that records calls by one autograd function without a residual, and by another with one."""

    def record(calls: FamilyCalls, operands: road.Operands, options: road.Options, recorded: Recorded | None) -> Any:
        x, weight, bias, residual, x_bias, *_ = operands
        if residual is not None:
            return add((calls, options, recorded), *operands)
        call = options, recorded
        # Autograd takes about 0.1 us for each None that is passed.
        if x_bias is not None:
            return plain(call, x, weight, bias, x_bias)
        return plain(call, x, weight) if bias is None else plain(call, x, weight, bias)

    return record


# The first records calls that are not known, and the second calls that were found and launched.
record = _recording(applied(_Normalise), applied(_AddNormalise))
record_known = _recording(applied_at_once(_Normalise), applied_at_once(_AddNormalise))

# The look-up itself finds out if a residual is added and if statistics are saved.
CALLS = road.calls_of(
    FORWARD,
    name="recorded",
    options=(*[row.name for row in FORWARD.parameters if row.functional and not row.kind.is_tensor], "fadd", "save_mv"),
    record=record,
    looked_up=(None, 5),
)
# Calls that add a residual behind a dropout of x, whose seed and offset are settled behind the look-up.
DROPS = road.calls_of(DROPPED, record=record, looked_up=(5, None))
native.record_by("recorded", partial(record_known, CALLS))


def normalise_dropped(operands: Operands, normalized_shape: Any, options: Options, asked: tuple[Any, Any]) -> Any:
    """Return the outputs of a known call with a dropout, or None; `asked` is dropout_p and dropout_rng as passed.

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


# Names of the gradients that are due, by flags of x (or residual), weight, bias, x_bias and what a dropout is applied
# to, or of the first ones alone.
WANTS: dict[tuple[bool, ...], tuple[str, ...]] = {
    due: tuple(compress(NormGradients._fields, due))
    for passed in (2, 3, 4, 5)
    for due in product((False, True), repeat=passed)
}


def gradients_of(options: road.Options, *operands: Any) -> NormGradients:
    """Return the gradients that are due.

    Args:
        options: the norm's word and the options of the family's rows.
        operands: the tensors of the family's rows, dy first, with dresidual_out, and with the rng of a dropout if there
            is one; rstd packs the means too.
    """
    rows = _DROPPED_BACKWARD if operands[6:] else _BACKWARD
    key: Key | None = None
    grads: NormGradients | None = None
    if not (torch.is_grad_enabled() or is_dynamo_compiling()):
        key, grads = getattr(native.calls, rows.name).gradients(operands, options)
    if grads is not None:
        return grads
    at = rows.inputs.index("dresidual_out")
    dy, dresidual_out = operands[0], operands[at]
    # Compiled autograd, for example, makes an eager call's backward pass part of a graph.
    seen = is_dynamo_compiling() or dispatch_modes() > 0
    if not (seen or arrived_in_memory((dy, dresidual_out))):
        return eager.plain_gradients(operands, options)
    # The operator has a gradient, which is asked for only where gradients are enabled in a backward pass.
    if seen or torch.is_grad_enabled():
        return gradients_by_operator(rows, operands, options)
    copies: Any = (walkable_gradient(dy), *operands[1:at], walkable_gradient(dresidual_out), *operands[at + 1 :])
    if copies[0] is not dy or copies[at] is not dresidual_out:
        # Copies may match the gradients of an earlier call.
        key, grads = getattr(native.calls, rows.name).gradients(copies, options)
        if grads is not None:
            return grads
    packed: NormGradients = launched(BACKWARD, options[0], key, road.named(rows, copies, options), packed=True)
    return packed


# Indexed by the batch invariance of the call.
GRADIENTS = {False: gradients_of, True: reentering(gradients_of)}


def walkable_gradient(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient that kernels can read, None if none arrived."""
    return None if gradient is None else walkable(resolved(gradient))


def gradients_by_operator(rows: FamilyCalls, operands: tuple[Any, ...], options: tuple[Any, ...]) -> NormGradients:
    """Compute `gradients_of` by an operator, which dispatch modes see, and autograd records."""
    args = road.named(rows, operands, options)
    for name in ("dy", "dresidual_out"):
        args[name] = walkable_gradient(args[name])
    x = args["x"]
    mean, rstd = unpacked(args["rstd"], x.numel() // x.shape[-1])
    # Operators of norms that keep the mean take none, and without rows the empty means are not told from rstd.
    args["mean"], args["rstd"] = (each.view(x.shape[:-1]) for each in (rstd if mean is None else mean, rstd))
    wants, args["wants"] = args["wants"], list(args["wants"])
    args["cast"] = word(Cast, "cast", args["cast"]).value
    grads = iter(operated(rows.functions[options[0]], args))
    return NormGradients(*[next(grads) if name in wants else None for name in NormGradients._fields])


# A residual add and the norm behind it, launched as one kernel and recorded as two functions.
#
# A model's forward adds first, and calls the norm next. The kernel runs at the sum and computes both results; autograd
# records each where the forward asks for it. Hooks on the sum, and `retain_grad`, see the gradient that torch's
# operators would give the sum.

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
    known = native.calls.added_ahead.normalise(operands, options)
    result: Any = _launched(operands, options) if known is None else known
    if result is None:
        return None
    first, second, *_ = result
    # A call without a gradient returns y and the sum.
    return (first, second) if isinstance(second, tuple) else (second, (first, None))


def _launched(operands: Operands, options: Options) -> Any:
    """Launch a call that is not known, recorded if a gradient is due, and make its kind known.

    Return None if no kernel serves the call, if something has to see operators, or if a tensor would be copied.
    """
    if not (is_served(operands) and operands[0].numel()):
        return None
    # The norm is recorded with the weight itself, not a copy, and torch gives a sum the layout of its operands.
    rows = as_operands(tuple(map(resolved, operands)), 1)
    if any(row is not each for row, each in zip(rows, operands, strict=True)):
        return None
    _, settled, planned = ready(CALLS, operands, full_options(operands, options))
    if planned is None:
        return None
    return _record(operands, options, recorded_of(planned)) if settled[-1] else run(planned)


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


# Autograd does not know y and the statistics when the sum is recorded, and saves nothing.
_SUM = Recording(
    lambda call, operands: (call[0], None, (), dtypes_of(operands), is_on()),
    lambda call: rounded((call.dy, call.dy), call.args, call.due),
)
_NORM = Recording(_launch_norm, _norm_gradients, sums=(0,))


def _record(operands: Operands, options: Options, recorded: Recorded) -> Any:
    """Record the sum of a call, or the norm if there is no residual."""
    y, total, statistics, _ = recorded
    x, weight, bias, residual, _ = operands
    if total is None:
        return norm_of_sum(options, (y, statistics), x, weight, bias)
    return record_at_once((_SUM, (total,)), x, residual), (y, statistics)


native.record_by("added_ahead", _record)
