"""Calls that add a residual to the normalised rows, with a second norm behind the sum or without: the two rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function

from ..calls import native, road
from ..calls.check import check_flag, check_tensor
from ..calls.launch import recorded_of, run
from ..calls.outputs import LayerNormOutput, of_norm, packing, rounded
from ..calls.record import BackwardPass, Gradients, Recording
from ..calls.road import Options, Outs, calls_of, launch_recorded, record_known
from ..calls.traced import is_dynamo_compiling
from ..codegen.parameters import ADDED, RENORMED
from ..errors import ConflictError
from . import eager
from .operands import DEFAULT_EPS, Operands
from .plain import WANTS, Ahead, gradients_of
from .plain_calls import handed_on, is_handed_on, normalise_family, with_offset


def _gradients(call: BackwardPass) -> Gradients:
    x, weight, x_bias, statistics = call.saved
    (norm, weight_offset, cast, dtypes), due = call.args, call.due
    # The residual is no operand of the norm.
    wants = WANTS[due[:3] + due[4:]]
    options = (norm, weight_offset, cast, None, dtypes[2], wants)
    grads: Any = (None,) * 4
    if wants:
        grads = gradients_of(options, call.dy, x, weight, statistics, x_bias, None)
    dx, dweight, dbias, dx_bias, *_ = grads
    return rounded((dx, dweight, dbias, call.dy, dx_bias), dtypes, due)


CALLS = calls_of(
    ADDED,
    eager=eager.added,
    # x, weight and x_bias.
    saved=lambda operands, _: (*operands[:2], operands[4]),
    args=lambda options, dtypes, _: (options[0], options[2], options[4], dtypes),
    recording=Recording(launch_recorded, _gradients),
)


def normalise(operands: Operands, options: Any, *shape: Sequence[int]) -> Any:
    """Run a call of a public function, or of a module with its normalized_shape; return y in residual's dtype."""
    norm, eps, weight_offset, _, cast, fadd, saves = options
    residual = operands[3]
    eps = DEFAULT_EPS if eps is None else eps
    given = (norm, eps, weight_offset, getattr(residual, "dtype", None), cast, fadd, saves)
    result = None if is_dynamo_compiling() else native.calls.added.normalise(operands, given, *shape)
    if result is not None:
        return result
    if is_handed_on(operands):
        if shape:
            return handle_torch_function(normalise, operands, operands, options, *shape)
        return handed_on(f"{norm}_norm_add", operands, road.named(CALLS, operands, given), positional=2)
    check_tensor("residual", residual)
    if norm == "layer" and weight_offset != 0.0:
        return normalise(*with_offset(operands, given), *shape)
    return normalise_family(CALLS, operands, given, *shape)


def _gradients_of_two(call: BackwardPass) -> Gradients:
    """Run the backward pass of each norm: that of the second adds dresidual_out, and leaves the gradient of the sum."""
    (x, weight, total, next_weight, statistics), (norm, weight_offset, cast, dtypes), dy, dresidual_out, due, *_ = call
    m = x.numel() // x.shape[-1]
    first, second = (of_norm(statistics, at, m, norm == "layer") for at in (0, 1))
    dsum: torch.Tensor | None = dresidual_out
    dnext: Any = (None, None)
    grads: Any = (None, None, None)
    if dy is not None and (wants := WANTS[any(due[:4]), due[4], due[5]]):
        options = (norm, weight_offset, cast, None, dtypes[5], wants)
        dsum, *dnext = gradients_of(options, dy, total, next_weight, second, None, dresidual_out)[:3]
    if dsum is not None and (wants := WANTS[due[:3]]):
        options = (norm, weight_offset, cast, None, dtypes[2], wants)
        grads = gradients_of(options, dsum, x, weight, first, None, None)[:3]
    return rounded((*grads, dsum, *dnext, None), dtypes, due)


RENORMED_CALLS = calls_of(
    RENORMED,
    eager=eager.renormed,
    # x, weight, the sum, and next_weight.
    saved=lambda operands, total: (*operands[:2], total, operands[4]),
    args=lambda options, dtypes, y_dtype: (
        *(options[0], options[2], eager.cast_of(options[3], dtypes[0] or y_dtype, y_dtype)),
        dtypes,
    ),
    recording=Recording(launch_recorded, _gradients_of_two, sums=(0, 1, 2, 3)),
)


def forward(operands: road.Operands, options: Options, outs: Outs) -> LayerNormOutput:
    """Run a call of `renormed_layernorm2d_fwd` or `renormed_rmsnorm2d_fwd`."""
    results: LayerNormOutput = road.launched_2d(RENORMED_CALLS, operands, road.options_2d(operands, options), outs)
    packed = results.rstd
    if packed is None:
        return results
    centres, leading = options[0] == "layer", operands[0].shape[:-1]
    m = math.prod(leading)
    length, _ = packing(m, centres)
    # Each norm's follow those of the norm before.
    mean, rstd = (
        packed[at:].unfold(0, m, packed.numel() - length).mT.view(*leading, 2) if m else packed.view(*leading, 2)
        for at in (0, length - m)
    )
    return results._replace(mean=mean if centres else None, rstd=rstd)


def add_ahead(operands: road.Operands, options: Options) -> tuple[torch.Tensor, Ahead] | None:
    """Normalise and add, and compute the norm of the sum for a later call of `plain.norm_of_sum`.

    Args:
        operands: the tensors of the family's row; residual has x's dtype and shape.
        options: the norm's word, and the other options.

    Returns:
        The sum, differentiable, and the argument `ahead` of `norm_of_sum`. None if something has to see operators, or
        if next_weight would be copied; nothing was computed then.

    Raises:
        NormforgeError: no kernel can serve the call.
    """
    rows, settled, planned = road.ready(RENORMED_CALLS, operands, options)
    # The second norm is recorded with the weight itself, not a copy.
    if planned is None or rows[4] is not operands[4]:
        return None
    if not settled[-1]:
        y, total, *_ = run(planned)
        assert total is not None
        return total, (y, None)
    y, sums, statistics, is_invariant = recorded_of(planned)
    assert sums is not None
    norm, eps, weight_offset, cast, *_ = options
    first, second = (of_norm(statistics, at, planned[4], norm == "layer") for at in (0, 1))
    given = (norm, eps, weight_offset, sums.dtype, cast, "post_add", True)
    return record_known(CALLS, (*rows[:4], None), given, (sums, None, first, is_invariant)), (y, second)


def add(operands: road.Operands, options: Options, next_norm: bool) -> Any:
    """Run a call of a public function: with a second norm or without; return y, or y and the sum."""
    x, weight, bias, residual, x_bias, next_weight, next_bias = operands
    if next_norm is False and next_weight is None and next_bias is None:
        return normalise(operands[:5], options)
    check_flag("next_norm", next_norm)
    if x_bias is not None:
        raise ConflictError("x_bias is not added where a second norm follows; add it to x, or leave next_norm out")
    norm, eps, weight_offset, _, cast, *_ = options
    taken = (x, weight, bias, residual, next_weight, next_bias, None)
    given = (norm, DEFAULT_EPS if eps is None else eps, weight_offset, cast, "none", None, None)
    result = None if is_dynamo_compiling() else native.calls.renormed.normalise(taken, given)
    if result is not None:
        return result
    if is_handed_on(taken):
        args = road.named(RENORMED_CALLS, taken, given) | {"next_norm": True}
        return handed_on(RENORMED_CALLS.functions[norm], taken, args, positional=2)
    check_tensor("residual", residual)
    if norm == "layer" and weight_offset != 0.0:
        (*first, _, _), others = with_offset(operands, options)
        if next_weight is not None:
            (_, next_weight), _ = with_offset((x, next_weight), options)
        return add((*first, next_weight, next_bias), others, True)
    return normalise_family(RENORMED_CALLS, taken, given)
