"""A residual added to what a dropout leaves of x, and the norm of the sum: launched, and recorded by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch.autograd import forward_ad

from ..random_mask import dropped
from ..selection import dispatch
from ..selection.invariance import is_on
from ..upstream.torch_dynamo import eager_only
from ..upstream.torch_internals import dispatch_modes
from . import eager, known
from .eager import Dropout, dtypes_of, rounded
from .first import resolved
from .functional import (
    BACKWARD_OF,
    FORWARD_OF,
    as_operands,
    backward_named,
    forward_given,
    taken,
)
from .known import PLAIN, UNREADABLE
from .outputs import LayerNormOutput, NormGradients, unflattened
from .public import DEFAULT_EPS, Operands, Options, layernorm2d_bwd, layernorm2d_fwd, rmsnorm2d_bwd, rmsnorm2d_fwd
from .record import Gradients, Launched, Recording, arrived_in_memory, record, record_at_once, records
from .recorded import walkable_gradient

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
    if records(operands):
        return record_at_once((_RECORDING, (options, dropout.p)), *operands, dropout.rng)
    return _launched(operands, options, dropout, save_mv=False)[:2]


def normalise(operands: Operands, shape: tuple[int, ...], options: Options, dropout: Dropout) -> Any:
    """What `recorded.normalise` returns where a dropout comes before the residual; arguments were checked.

    Args:
        operands: x and residual are (..., *shape), the others shape.
        shape: the dimensions that are normalised together.
        options: see `public.Options`.
        dropout: what is dropped.

    Returns:
        y and residual_out, of x's shape.
    """
    given: Any = tuple(map(resolved, operands))
    rows = as_operands(given, len(shape))
    if records(rows):
        y, total = record((_RECORDING, (options, dropout.p)), *rows, dropout.rng)
    else:
        y, total = _launched(rows, options, dropout, save_mv=False)[:2]
    return unflattened(y, shape), unflattened(total, shape)


def _launched(rows: Operands, options: Options, dropout: Dropout, *, save_mv: bool) -> LayerNormOutput:
    given = forward_given(rows, options, save_mv) | {"dropout_p": dropout.p, "dropout_rng": dropout.rng}
    return _FORWARD[options[0]](**taken(FORWARD_OF[options[0]], given))


def _launch_recorded(call: tuple[Options, float], given: tuple[Any, ...]) -> Launched:
    """See `Recording.launch`. Save residual_out, which the caller holds anyway, and the rng in place of the mask."""
    options, p = call
    *operands, rng = given
    rows: Any = tuple(operands)
    y, total, _, mean, rstd = _launched(rows, options, Dropout(p, rng), save_mv=True)
    # Of fp32 alone nothing was rounded first, whatever the sum is stored in.
    norm, _, weight_offset, _, cast = options
    cast = "after_weight" if rows[0].dtype is y.dtype is torch.float32 else cast
    return y, total, (total, rows[1], mean, rstd, rng), (norm, weight_offset, cast, p, dtypes_of(given)), is_on()


def _gradients(
    saved: Sequence[Any],
    args: Any,
    dy: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    due: tuple[bool, ...],
    by_formula: bool,
    _: None,
) -> Gradients:
    total, weight, mean, rstd, rng = saved
    norm, weight_offset, cast, p, dtypes = args
    x_dtype, _, bias_dtype, residual_dtype, x_bias_dtype, _ = dtypes
    # The sum holds x_bias already; given as zeros, it has the kernel sum ddropped before it is rounded.
    nothing = total.new_zeros(total.shape[-1:], dtype=x_bias_dtype) if due[4] else None
    operands = (dy, total, weight, rstd, nothing, dresidual_out)
    wants = tuple(compress(("ddropped", "dweight", "dbias", "dx", "dx_bias"), due))
    options = (norm, weight_offset, cast, residual_dtype, bias_dtype, wants)
    if dy is None:
        found = _of_the_sum(dresidual_out, p, rng, nothing)
    # The kernels' function is an operator where something sees operators.
    elif torch.is_grad_enabled() or not arrived_in_memory((dy, dresidual_out)):
        found = eager.plain_gradients(operands, mean, options, Dropout(p, rng, x_dtype))
    else:
        given = backward_named(operands, options)
        for name in ("dy", "dresidual_out"):
            given[name] = walkable_gradient(given[name])
        given |= {"mean": mean, "dropout_p": p, "dropout_rng": rng, "dropped_dtype": x_dtype}
        found = _BACKWARD[norm](**taken(BACKWARD_OF[norm], given))
    return rounded((found.ddropped, found.dweight, found.dbias, found.dx, found.dx_bias, None), dtypes, due)


# x, residual and x_bias make the sum.
_RECORDING = Recording(_launch_recorded, _gradients, sums=(0, 3, 4))


def _of_the_sum(dresidual_out: Any, p: float, rng: torch.Tensor, x_bias: torch.Tensor | None) -> NormGradients:
    """Return the gradients where one arrived for the sum alone; none of x_bias if that is None."""
    ddropped = dropped(eager.widened(dresidual_out), p, rng)
    return NormGradients(dresidual_out, None, None, None if x_bias is None else eager.over_rows(ddropped), ddropped)
