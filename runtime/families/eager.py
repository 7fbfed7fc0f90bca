"""Norms in torch's own operators, forward and backward: the fallback where no kernel runs, and second derivatives.

Each family has one formula: plain (with or without dropout), gated, modulated and group norms, and rotary embeddings.
Autograd differentiates the formula, with the saved statistics in the place of eps, once or more often. Gradients are
computed in fp32, and each is rounded once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ..calls.outputs import NormGradients, dtypes_of, rounded, unpacked_of
from ..calls.traced import unrecorded
from ..codegen.groups import Span
from ..codegen.values import Cast, GateActivation, Gating, Norm
from ..dtypes import rounded_to, word
from ..random_mask import dropped
from ..selection.invariance import refuse_torch
from ..upstream.torch_internals import constant_in_traces, is_forward_ad_on, jit_tracing
from .operands import (
    GatedArgs,
    GatedSaved,
    GroupArrived,
    GroupNormGradients,
    GroupOperands,
    GroupOptions,
    ModulatedArgs,
    ModulatedOperands,
    ModulatedOptions,
    ModulatedSaved,
    Operands,
    Options,
)

Tensors = Sequence["torch.Tensor | None"]
# Eps, or the mean, if any, and the rstd that were saved.
By = float | tuple["torch.Tensor | None", torch.Tensor] | None

# Pieces that all families share.


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to the dtype of arithmetic: fp64 stays fp64, every other dtype becomes fp32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def as_stored(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round a sum to the dtype it is stored in, and widen it again; autograd sees no rounding."""
    # An infinite sum less itself is NaN, and its rounding changes nothing.
    return total + (widened(total.to(dtype)) - total).detach().nan_to_num(0.0, math.inf, -math.inf)


@constant_in_traces
def _rounded_to(cast: str | Cast, y_dtype: torch.dtype, x_dtype: torch.dtype) -> torch.dtype | None:
    return rounded_to(word(Cast, "cast", cast), y_dtype, x_dtype)


def _offset(weight: torch.Tensor | None, weight_offset: float | None) -> torch.Tensor | None:
    return weight if weight is None or not weight_offset else widened(weight) + weight_offset


def _affine(h: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    dtypes = [tensor.dtype for tensor in (h, weight, bias) if tensor is not None]
    wide = functools.reduce(torch.promote_types, dtypes, torch.float32)
    y = h.to(wide) if weight is None else h.to(wide) * weight.to(wide)
    return y if bias is None else y + bias.to(wide)


def _norm(
    norm: str,
    x: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: By,
) -> torch.Tensor:
    """Call torch's own norm, or normalise the last dimension by saved statistics."""
    # Sizes are tensors where torch.jit.trace records them, and none is compared.
    if x.device.type != "meta" and (jit_tracing() or 0 not in x.shape):
        refuse_torch(f"{'the gradient of ' * isinstance(eps, tuple)}a norm of {x.dtype} on {x.device}")
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if len(dtypes) > 1:
        # Which types go together depends on the device and on the transform, and the kernels take any.
        wide = functools.reduce(torch.promote_types, dtypes, torch.float32)
        weight, bias = (None if parameter is None else parameter.to(wide) for parameter in (weight, bias))
        return _norm(norm, x.to(wide), shape, weight, bias, eps).to(x.dtype)
    if isinstance(eps, tuple):
        return _affine(_by_statistics(norm, x, *eps), weight, bias)
    if norm == "rms":
        return functional.rms_norm(x, list(shape), weight, eps)
    assert eps is not None
    averages, clamps = _constants(norm)
    if averages and not is_forward_ad_on():
        return functional.layer_norm(x, list(shape), weight, bias, eps)
    # torch has no L2 norm, and the second tangent of its layer_norm is wrong
    # (https://github.com/pytorch/pytorch/issues/196700).
    rows, dims = widened(x), tuple(range(-len(shape), 0))
    if clamps:
        rows = rows / torch.linalg.vector_norm(rows, dim=dims, keepdim=True).clamp_min(eps)
        return _affine(rows, weight, bias).to(x.dtype)
    rows = rows - rows.mean(dims, keepdim=True) if averages else rows
    square = rows.square()
    over_row = square.mean(dims, keepdim=True) if averages else square.sum(dims, keepdim=True)
    return _affine(rows * torch.rsqrt(over_row + eps), weight, bias).to(x.dtype)


@constant_in_traces
def _constants(norm: str) -> tuple[bool, bool]:
    row = word(Norm, "norm", norm).row
    return row.averages, row.clamps


def _last_dimension(x: torch.Tensor) -> tuple[int, ...]:
    with unrecorded():
        return tuple(x.shape[-1:])


def _by_statistics(norm: str, s: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor) -> torch.Tensor:
    """Return rows normalised by saved statistics, which become functions of the rows with the saved values.

    They imply eps. A negative rstd is that of a clamped row, and no function of the row.
    """
    averages, clamps = _constants(norm)
    rstd = rstd.view(*s.shape[:-1], 1)
    clamped, rstd = (rstd < 0, rstd.abs()) if clamps else (None, rstd)
    if mean is not None:
        centre = s.mean(-1, keepdim=True)
        s = s - (mean.view(rstd.shape) + (centre - centre.detach()))
    h = s * rstd
    squares = h.square()
    total = squares.mean(-1, keepdim=True) if averages else squares.sum(-1, keepdim=True)
    change = total - total.detach()
    return h * torch.rsqrt(1 + (change if clamped is None else change.masked_fill(clamped, 0.0)))


# Plain norms, with or without a residual, x_bias, a cast before the weight, and dropout.


class Dropout(NamedTuple):
    """A dropout of x, applied behind x_bias and before the residual is added.

    Attributes:
        p: the probability that an element is dropped.
        rng: seed and offset, which determine the mask.
    """

    p: float
    rng: torch.Tensor


def plain(
    operands: Operands,
    shape: tuple[int, ...],
    options: Options,
    dropout: Dropout | None = None,
    after: torch.Tensor | None = None,
) -> Any:
    """Return the outputs of `plain.normalise` for the same arguments.

    eps=None takes torch's own default. `after` is added to the normalised rows, and requires an out_dtype.
    """
    x, weight, bias, residual, x_bias = operands
    norm, eps, weight_offset, out_dtype, cast = options
    to = _rounded_to(cast, out_dtype or x.dtype, x.dtype)
    weight = _offset(weight, weight_offset)
    if x_bias is None and residual is None and out_dtype is None and to is None:
        return _norm(norm, x, shape, weight, bias, eps)
    total = widened(x) if x_bias is None else widened(x) + widened(x_bias)
    if dropout is not None:
        total = dropped(total, dropout.p, dropout.rng)
    if residual is not None:
        total = as_stored(total + widened(residual), residual.dtype)
    if to is None:
        y = _norm(norm, total, shape, weight, bias, eps)
    else:
        y = _affine(_norm(norm, total, shape, None, None, eps).to(to), weight, bias)
    y = (y if after is None else y + widened(after)).to(out_dtype or x.dtype)
    return y if residual is None else (y, total.to(residual.dtype))


def added(operands: Operands, options: Sequence[Any]) -> torch.Tensor:
    """Return the output of `road.normalise` for a call that adds the residual behind the norm."""
    x, weight, bias, residual, x_bias = operands
    norm, eps, weight_offset, out_dtype, cast, *_ = options
    row = (norm, eps, weight_offset, out_dtype, cast)
    y: torch.Tensor = plain((x, weight, bias, None, x_bias), _last_dimension(x), row, after=residual)
    return y


def renormed(operands: Sequence[Any], options: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of `road.normalise` for a call of two norms with an add between them."""
    x, weight, bias, residual, next_weight, next_bias, _ = operands
    norm, eps, weight_offset, cast, _, out_dtype, _ = options
    y_dtype, shape = out_dtype or x.dtype, _last_dimension(x)
    cast = cast_of(cast, x.dtype, y_dtype)
    first = (norm, eps, weight_offset, residual.dtype, cast)
    total: torch.Tensor = plain((x, weight, bias, None, None), shape, first, after=residual)
    y = plain((total, next_weight, next_bias, None, None), shape, (norm, eps, weight_offset, y_dtype, cast))
    return y, total


def statistics(norm: str, x: torch.Tensor, eps: float) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the mean, if the norm subtracts one, and rstd of each row, differentiable; of an fp64 x in fp64."""
    if x.device.type != "meta" and (jit_tracing() or 0 not in x.shape):
        refuse_torch(f"statistics of {x.dtype} on {x.device}")
    rows = widened(x)
    mean = rows.mean(-1, keepdim=True) if norm == "layer" else None
    rows = rows if mean is None else rows - mean
    return None if mean is None else mean.squeeze(-1), torch.rsqrt(rows.square().mean(-1) + eps)


def statistics_gradient(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dmean: torch.Tensor | None,
    drstd: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return the gradient of x, differentiable in all tensors, given those of the statistics.

    Of a row of N values, the gradient of the mean is 1 / N, and that of rstd is -rstd**3 * (x - mean) / N.
    """
    dx = None if dmean is None else dmean.unsqueeze(-1).expand(x.shape)
    if drstd is not None:
        rows = widened(x) if mean is None else widened(x) - mean.unsqueeze(-1)
        through = rows * (-drstd * rstd.pow(3)).unsqueeze(-1)
        dx = through if dx is None else dx + through
    return None if dx is None else (dx / x.shape[-1]).to(x.dtype)


def cast_of(cast: str | Cast, x_dtype: torch.dtype, y_dtype: torch.dtype) -> str | Cast:
    """Return the effective cast of two norms: without 16 bits in x or y neither rounds first."""
    return cast if _rounded_to(cast, y_dtype, x_dtype) else "after_weight"


def plain_gradients(operands: Sequence[Any], options: Sequence[Any]) -> NormGradients:
    """Return what `plain.gradients_of` returns for the same arguments, differentiable.

    The statistics may be two tensors, the first None for RMSNorm. dy may be None if only dx is due.
    """
    dy, x, weight, statistics, x_bias, dresidual_out, *rng = operands
    norm, weight_offset, cast, dx_dtype, bias_dtype, wants, *dropping = options
    dy = torch.zeros_like(x) if dy is None else dy
    to = _rounded_to(cast, dy.dtype, x.dtype)

    def compute(s: torch.Tensor, weight: Any, bias: Any, x_bias: Any, before: Any) -> Tensors:
        if before is not None:
            # A dropout of zeros, beside the sum that was stored.
            s = s + dropped(before if x_bias is None else before + x_bias, dropping[0], *rng)
        elif x_bias is not None:
            s = s + x_bias
        h = _norm(norm, s, _last_dimension(s), None, None, unpacked_of(x, statistics))
        return _affine(h if to is None else as_stored(h, to), _offset(weight, weight_offset), bias), s

    # Whose values are not kept, and change nothing.
    bias = x.new_zeros(x.shape[-1:], dtype=torch.float32) if "dbias" in wants else None
    before = torch.zeros_like(x, dtype=torch.float32) if rng else None
    inputs = (x, weight, bias, x_bias, before)
    own_dtypes = dtypes_of(inputs)
    dtypes = (dx_dtype or x.dtype, own_dtypes[1], bias_dtype, own_dtypes[3], (dropping[1] if rng else None) or x.dtype)
    due = [name in wants for name in NormGradients._fields]
    return NormGradients(*rounded(_gradients(compute, inputs, due, (dy, dresidual_out)), dtypes, due))


# Gated norms: y = norm(x) * act(gate), or y = norm(x * act(gate)).


def gated(operands: Sequence[Any], options: Sequence[Any]) -> Any:
    """Return the outputs of `road.normalise` for a gated call."""
    x, gate, weight, bias = operands
    norm, gating, activation, eps, weight_offset, _, out_dtype, _ = options
    is_before = word(Gating, "gating", gating).is_before
    wide = widened(gate)
    rising = torch.sigmoid(wide)
    factor = rising if word(GateActivation, "activation", activation) is GateActivation.SIGMOID else wide * rising
    s = widened(x)
    y = _norm(norm, s * factor if is_before else s, _last_dimension(x), None, None, eps)
    y = _affine(y, _offset(weight, weight_offset), bias)
    return (y if is_before else y * factor).to(out_dtype or x.dtype)


def gated_gradients(
    saved: GatedSaved, args: GatedArgs, dy: torch.Tensor, dsum: None, due: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Return the gradients of a gated call's operands that are due, differentiable."""
    *operands, mean, rstd = saved
    options = (args.norm, args.gating, args.activation, (mean, rstd), args.weight_offset, None, None, None)
    grads = _gradients(lambda *each: (gated(each, options),), operands, due, (dy,))
    return rounded(grads, args.dtypes, due)


# Modulated norms: y = norm(x * gate + residual) * (1 + scale) + shift.


def modulated(operands: ModulatedOperands, options: ModulatedOptions) -> Any:
    """Return the outputs of `road.normalise` for a modulated call."""
    x, scale, shift, gate, residual, weight, bias = operands
    norm, eps, weight_offset, _, out_dtype, _ = options
    total = widened(x)
    if gate is not None:
        total = total * _per_sample(gate, x)
    if residual is not None:
        total = as_stored(total + widened(residual), residual.dtype)
    y = _modulated(norm, total, scale, shift, _offset(weight, weight_offset), bias, eps).to(out_dtype or x.dtype)
    return y if residual is None else (y, total.to(residual.dtype))


def _modulated(norm: str, s: torch.Tensor, scale: Any, shift: Any, weight: Any, bias: Any, eps: By) -> torch.Tensor:
    y = _norm(norm, s, _last_dimension(s), weight, bias, eps)
    return y * (1 + _per_sample(scale, s)) + _per_sample(shift, s)


def _per_sample(operand: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a modulation in the dtype of arithmetic, of a shape that broadcasts to x's."""
    wide = widened(operand)
    if 1 < wide.dim() < x.dim():
        for _ in range(x.dim() - wide.dim()):
            wide = wide.unsqueeze(1)
    return wide


def modulated_gradients(
    saved: ModulatedSaved,
    args: ModulatedArgs,
    dy: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    due: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Return the gradients of a modulated call's operands that are due, differentiable."""
    rows, scale, shift, gate, weight, bias, gated, mean, rstd = saved
    for_x, for_scale, for_shift, for_gate, for_residual, for_weight, for_bias = due

    def compute(s: torch.Tensor, scale: Any, shift: Any, weight: Any, bias: Any) -> Tensors:
        return _modulated(args.norm, s, scale, shift, _offset(weight, args.weight_offset), bias, (mean, rstd)), s

    needed = (for_x or for_residual or for_gate, for_scale, for_shift, for_weight, for_bias)
    grads = _gradients(compute, (rows, scale, shift, weight, bias), needed, (dy, dresidual_out))
    ds, dscale, dshift, dweight, dbias = grads
    dx, dgate = ds, None
    if gate is not None:
        dx, dgate = _gradients(lambda x, gate: (x * _per_sample(gate, x),), (gated, gate), (for_x, for_gate), (ds,))
    return rounded((dx, dscale, dshift, dgate, ds, dweight, dbias), args.dtypes, due)


# GroupNorm.


def group(operands: GroupOperands, options: GroupOptions) -> torch.Tensor:
    """Return y of `group.normalise` for the same arguments."""
    x, weight, bias = operands
    with unrecorded():
        has_memory = x.device.type != "meta" and 0 not in x.shape
    if has_memory:
        refuse_torch(f"a GroupNorm of {x.dtype} on {x.device}")
    if weight is None and bias is not None:
        # Without a weight torch computes no gradient of its bias, and its process may crash (2.13, on a CPU).
        weight = torch.ones_like(bias, requires_grad=False)
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if len(dtypes) == 1 and options.activation == "none" and options.out_dtype in (None, x.dtype):
        return torch.group_norm(x, options.num_groups, weight, bias, options.eps)
    # The norm and the activation share one rounding.
    wide = widened(x)
    weight, bias = (None if vector is None else vector.to(wide.dtype) for vector in (weight, bias))
    y = torch.group_norm(wide, options.num_groups, weight, bias, options.eps)
    if options.activation == "silu":
        y = functional.silu(y)
    return y.to(options.out_dtype or x.dtype)


def group_gradients(arrived: GroupArrived) -> GroupNormGradients:
    """Return the gradients of a call of GroupNorm that are due, differentiable; `group` has the kernels."""
    dy, x, weight, bias, statistics, options, wants = arrived
    span = Span.of(options.num_groups)
    mean, rstd = statistics
    by = mean if span.centres else None, rstd

    def compute(x: torch.Tensor, weight: Any, bias: Any) -> Tensors:
        # The elements that share statistics are the last dimension.
        s = x.reshape(x.shape[0], options.num_groups, -1) if span.is_group else x.flatten(2).movedim(1, -1)
        h = _norm(span.norm.value, s, _last_dimension(s), None, None, by)
        h = (h if span.is_group else h.movedim(-1, 1)).reshape(x.shape)
        z = _affine(h, _per_channel(weight, x), _per_channel(bias, x))
        return (functional.silu(z) if options.activation == "silu" else z,)

    operands = (x, weight, bias)
    due = [name in wants for name in GroupNormGradients._fields]
    return GroupNormGradients(*rounded(_gradients(compute, operands, due, (dy,)), dtypes_of(operands), due))


def _per_channel(vector: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """Return a vector of channels in a shape that broadcasts to x's."""
    return None if vector is None else vector.reshape(-1, *[1] * (x.dim() - 2))


# Queries and keys: the norm of each head, and its rotary embedding.


def embedded(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, half: int, interleaved: bool) -> torch.Tensor:
    """Rotate `half` pairs of columns of x; tables have a column for each pair, or for each column."""
    pairs, axis = ((half, -1), -1) if interleaved else ((-1, half), -2)
    by_pair = [torch.unflatten(each, -1, pairs) for each in (x, cos, sin)]
    (first, second), *angles = [(each.select(axis, 0), each.select(axis, -1)) for each in by_pair]
    (cos_first, cos_second), (sin_first, sin_second) = angles
    turned = first * cos_first - second * sin_first, second * cos_second + first * sin_second
    return torch.stack(turned, axis).flatten(-2)


def rotary(operands: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Return the results of `rotary.normalise` for the same tensors and checked options, differentiable."""
    q, k, q_weight, k_weight, cos, sin, positions = operands
    norm, eps, interleaved, rotary_dim, weight_offset, cast, height, width, alternates = options
    leading = q.shape[:-2]
    at: Any = positions
    if height + width:
        pairs = torch.arange(rotary_dim // 2, device=q.device)
        turn = pairs % 3
        axis = torch.where(pairs < 3 * torch.where(turn == 1, height, width), turn, 0)
        if not alternates:
            axis = (pairs >= len(pairs) - height - width).long() + (pairs >= len(pairs) - width)
        at = positions[axis].movedim(0, -1), pairs
    rows = [widened(each if positions is None else each[at]) for each in (cos, sin)]

    def by_token(table: torch.Tensor) -> torch.Tensor:
        # All tokens in one dimension, or dimensions that broadcast against q's. jit.trace warns of compared sizes.
        is_flat = table.dim() == 2 and len(leading) > 1 and table.shape[0] == math.prod(leading)
        return (table.reshape(*leading, table.shape[-1]) if is_flat else table).unsqueeze(-2)

    by_cos, by_sin = map(by_token, rows)

    def rotated(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        h = _norm(norm, widened(x), _last_dimension(x), None, None, eps)
        to = _rounded_to(cast, x.dtype, x.dtype)
        y = _affine(h if to is None else as_stored(h, to), _offset(weight, weight_offset), None)
        turned = embedded(y[..., :rotary_dim], by_cos, by_sin, rotary_dim // 2, interleaved)
        return torch.cat((turned, y[..., rotary_dim:]), -1).to(x.dtype)

    return rotated(q, q_weight), rotated(k, k_weight)


def write_keys(
    k: torch.Tensor, key_cache: torch.Tensor, slot_mapping: torch.Tensor, k_scale: torch.Tensor | None
) -> None:
    """Write keys to the slots of their tokens in a cache of blocks."""
    slots, keys, cache = slot_mapping.flatten(), k.flatten(0, -3), key_cache
    if cache.dtype is torch.float8_e4m3fn:
        keys = (widened(keys) if k_scale is None else widened(keys) / k_scale).clamp(-448, 448).to(cache.dtype)
        # Torch moves bytes where it does not move fp8.
        keys, cache = keys.view(torch.uint8), cache.view(torch.uint8)
    there = slots >= 0
    slots = slots[there]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = keys[there]


# Gradients of every family: torch's operators differentiate the formulas above.


def _gradients(
    compute: Callable[..., Tensors], operands: Tensors, due: Sequence[bool], arrived: Tensors
) -> list[torch.Tensor | None]:
    """Return the gradients that `differentiated` returns, computed in fp32 and not rounded."""
    wide, arriving = ([None if each is None else each.float() for each in side] for side in (operands, arrived))
    return differentiated(compute, wide, due, arriving)


def differentiated(
    compute: Callable[..., Tensors], operands: Tensors, due: Sequence[bool], arrived: Tensors
) -> list[torch.Tensor | None]:
    """Return the gradients of some operands, given those of the results that `compute` makes of the operands.

    Args:
        compute: from the operands to results, by torch's operators.
        operands: of the call.
        due: for each operand, whether its gradient is.
        arrived: the gradient of each result; None where none arrived.

    Returns:
        A gradient per operand; None where none is due. The gradients are differentiable if gradients are enabled.
    """
    wanted = [at for at, operand in enumerate(operands) if operand is not None and due[at]]
    there = [at for at, gradient in enumerate(arrived) if gradient is not None]

    def of_wanted(*inputs: Any) -> tuple[Any, ...]:
        each = [*operands]
        for at, operand in zip(wanted, inputs, strict=True):
            each[at] = operand
        results = compute(*each)
        return tuple([results[at] for at in there])

    inputs: list[Any] = [operands[at] for at in wanted]
    gradients: Any = tuple([arrived[at] for at in there])
    found: Any = ()
    if not inputs or not gradients:
        pass
    elif is_dynamo_compiling():
        # TorchDynamo, which compiled autograd is traced by, follows nothing else. Where hooks on saved tensors are set,
        # which is never in a trace, torch.func refuses them.
        pull_back: Any = torch.func.vjp(of_wanted, *inputs)[1]
        found = pull_back(gradients)
    else:
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views of tensors that are in the graph already, or leaves of a graph that ends here.
            inputs = [x.view_as(x) if again and x.requires_grad else x.detach().requires_grad_() for x in inputs]
            pairs = [pair for pair in zip(of_wanted(*inputs), gradients, strict=True) if pair[0].requires_grad]
        if pairs:
            results, gradients = zip(*pairs, strict=True)
            found = torch.autograd.grad(results, inputs, gradients, create_graph=again, materialize_grads=True)
    by_place = dict(zip(wanted, found, strict=False))
    return [by_place.get(at) for at in range(len(operands))]
