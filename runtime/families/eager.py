"""Norms in torch's own operators, forward and backward: the fallback where no kernel runs, and second derivatives.

Each family has a forward formula and a differentiable backward formula: plain (with or without dropout), gated,
modulated and group norms. Backward formulas compute in fp32, round each gradient once and sum rows in a fixed order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..calls.outputs import NormGradients, dtypes_of, rounded, unpacked_of
from ..calls.record import BackwardPass
from ..calls.traced import unrecorded
from ..codegen.groups import Span
from ..codegen.values import ACROSS_HEADS, Cast, GateActivation, Gating, Norm
from ..dtypes import rounded_to, word
from ..random_mask import dropped
from ..selection.invariance import refuse_torch
from ..upstream.torch_internals import constant_in_traces, is_forward_ad_on, jit_tracing
from .operands import (
    GatedSaved,
    GroupOperands,
    GroupOptions,
    ModulatedOperands,
    ModulatedOptions,
    ModulatedSaved,
    Operands,
    Options,
)

Tensors = Sequence["torch.Tensor | None"]

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


def _refuse(what: str, x: torch.Tensor) -> None:
    """Refuse to compute something of x by torch's operators under batch invariance, unless x has no values."""
    # Sizes are tensors where torch.jit.trace records them, and none is compared.
    if x.device.type != "meta" and (jit_tracing() or 0 not in x.shape):
        refuse_torch(f"{what} of {x.dtype} on {x.device}")


def _norm(
    norm: str,
    x: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float | None,
) -> torch.Tensor:
    """Call torch's own norm."""
    _refuse("a norm", x)
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if len(dtypes) > 1:
        # Which types go together depends on the device and on the transform, and the kernels take any.
        wide = functools.reduce(torch.promote_types, dtypes, torch.float32)
        weight, bias = (None if parameter is None else parameter.to(wide) for parameter in (weight, bias))
        return _norm(norm, x.to(wide), shape, weight, bias, eps).to(x.dtype)
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


class _Normalised(NamedTuple):
    """Rows normalised by saved statistics.

    Attributes:
        h: the normalised rows.
        rstd: the saved rstd, of shape (..., 1), without its sign.
        centres: True if the mean was subtracted.
        averages: True if sums along a row are divided by its length.
        clamped: True for a row whose rstd is no function of the row; None if each row's is one.
    """

    h: torch.Tensor
    rstd: torch.Tensor
    centres: bool
    averages: bool
    clamped: torch.Tensor | None

    def along(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean along each row, or the sum if the norm does not average; 0 for a clamped row."""
        total = rows.mean(-1, keepdim=True) if self.averages else rows.sum(-1, keepdim=True)
        return total if self.clamped is None else total.masked_fill(self.clamped, 0.0)


def _normalised(
    s: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor, averages: bool = True, clamps: bool = False
) -> _Normalised:
    """Return rows normalised by saved statistics.

    Where a second derivative could be asked for, statistics become functions of the rows, with the saved values. They
    imply eps.
    """
    rstd = rstd.view(*s.shape[:-1], 1)
    mean = None if mean is None else mean.view(rstd.shape)
    clamped, rstd = (rstd < 0, rstd.abs()) if clamps else (None, rstd)
    saved = _Normalised(s, rstd, mean is not None, averages, clamped)
    if torch.is_grad_enabled() and s.requires_grad:
        if mean is None:
            square = saved.along(s.square())
        else:
            centre = s.mean(-1, keepdim=True)
            mean = mean + (centre - centre.detach())
            square = (s - centre).square().mean(-1, keepdim=True)
        rstd = (rstd.pow(-2) + (square - square.detach())).rsqrt()
    return saved._replace(h=s * rstd if mean is None else (s - mean) * rstd, rstd=rstd)


def _through_rows(g: torch.Tensor, normalised: _Normalised, dresidual_out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the gradient of rows, given that of the normalised rows (g) and that of the stored sum."""
    if 0 not in g.shape:
        refuse_torch(f"a norm's gradient on {g.device}")
    dx = g - normalised.h * normalised.along(g * normalised.h)
    if normalised.centres:
        dx = dx - normalised.along(g)
    dx = dx * normalised.rstd
    return dx if dresidual_out is None else dx + dresidual_out.float()


def over_rows(gradient: torch.Tensor, columns: int = 1) -> torch.Tensor:
    """Sum a gradient in fp32 over all dimensions but the last `columns`."""
    leading = tuple(range(gradient.dim() - columns))
    return gradient.sum(leading, dtype=torch.float32) if leading else gradient.float()


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


def added(operands: Operands, options: Sequence[Any]) -> Any:
    """Return the output of `road.normalise` for a call that adds the residual behind the norm."""
    x, weight, bias, residual, x_bias = operands
    norm, eps, weight_offset, out_dtype, cast, *_ = options
    row = (norm, eps, weight_offset, out_dtype, cast)
    return plain((x, weight, bias, None, x_bias), _last_dimension(x), row, after=residual)


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
    _refuse("statistics", x)
    rows = widened(x)
    mean = rows.mean(-1, keepdim=True) if norm == "layer" else None
    rows = rows if mean is None else rows - mean
    return None if mean is None else mean.squeeze(-1), torch.rsqrt(rows.square().mean(-1) + eps)


def statistics_gradients(call: BackwardPass) -> tuple[torch.Tensor | None]:
    """Return the gradient of x, differentiable in all tensors, given those of the statistics.

    Of a row of N values, the gradient of the mean is 1 / N, and that of rstd is -rstd**3 * (x - mean) / N.
    """
    x, mean, rstd = call.saved
    dmean, drstd = (None, call.dy) if mean is None else (call.dy, call.dresidual_out)
    dx = None if dmean is None else dmean.unsqueeze(-1).expand(x.shape)
    if drstd is not None:
        rows = widened(x) if mean is None else widened(x) - mean.unsqueeze(-1)
        through = rows * (-drstd * rstd.pow(3)).unsqueeze(-1)
        dx = through if dx is None else dx + through
    return (None if dx is None else (dx / x.shape[-1]).to(x.dtype),)


def cast_of(cast: str | Cast, x_dtype: torch.dtype, y_dtype: torch.dtype) -> str | Cast:
    """Return the effective cast of two norms: without 16 bits in x or y neither rounds first."""
    return cast if _rounded_to(cast, y_dtype, x_dtype) else "after_weight"


def plain_gradients(operands: Sequence[Any], options: Sequence[Any]) -> NormGradients:
    """Return what `plain.gradients_of` returns for the same arguments, differentiable.

    The statistics may be two tensors, the first None for RMSNorm. dy may be None if only dx is due.
    """
    dy, x, weight, statistics, x_bias, dresidual_out, *rng = operands
    norm, weight_offset, cast, dx_dtype, bias_dtype, wants, *dropping = options
    mean, rstd = unpacked_of(x, statistics)
    s = x.float() if x_bias is None else x.float() + x_bias.float()
    normalised = _normalised(s, mean, rstd, *_constants(norm))
    h, *_ = normalised
    dy = torch.zeros_like(x) if dy is None else dy
    to = _rounded_to(cast, dy.dtype, x.dtype)
    weighted = h if to is None else h.to(to).float()
    dy = dy.float()
    g = dy if weight is None else dy * (weight.float() + weight_offset)
    dx = _through_rows(g, normalised, dresidual_out)
    ddropped = dropped(dx, dropping[0], *rng) if rng else dx
    # One rounding each.
    exact = (
        ("dx", dx, dx_dtype or x.dtype),
        ("dweight", dy * weighted, None if weight is None else weight.dtype),
        ("dbias", dy, bias_dtype),
        ("dx_bias", ddropped, None if x_bias is None else x_bias.dtype),
        ("ddropped", ddropped, (dropping[1] if rng else None) or x.dtype),
    )
    grads = {
        name: (rows if name in ("dx", "ddropped") else over_rows(rows)).to(dtype)
        for name, rows, dtype in exact
        if name in wants
    }
    return NormGradients(*[grads.get(name) for name in NormGradients._fields])


# Gated norms: y = norm(x) * act(gate), or y = norm(x * act(gate)).


def gated(operands: Sequence[Any], options: Sequence[Any]) -> Any:
    """Return the outputs of `road.normalise` for a gated call."""
    x, gate, weight, bias = operands
    norm, gating, activation, eps, weight_offset, _, out_dtype, _ = options
    is_before = word(Gating, "gating", gating).is_before
    factor = _activated(activation, widened(gate))
    s = widened(x)
    y = _norm(norm, s * factor if is_before else s, _last_dimension(x), None, None, eps)
    y = _affine(y, _offset(weight, weight_offset), bias)
    return (y if is_before else y * factor).to(out_dtype or x.dtype)


def gated_gradients(call: BackwardPass) -> list[torch.Tensor | None]:
    """Return the gradients of a gated call's operands that are due, differentiable; `gated` has the kernels.

    With f the activated gate, f' its slope and h the normalised rows: behind the norm, dgate = dy * (h * weight + bias)
    * f', and dy * f takes dy's place. In front of it, the norm's backward pass makes ds of dy, dx = ds * f and dgate =
    ds * x * f'.
    """
    saved: GatedSaved = call.saved
    args, due = call.args, call.due
    is_before = word(Gating, "gating", args.gating).is_before
    assert call.dy is not None
    x, gate, dy = saved.x.float(), saved.gate.float(), call.dy.float()
    factor = _activated(args.activation, gate)
    normalised = _normalised(x * factor if is_before else x, saved.mean, saved.rstd)
    h, *_ = normalised
    weight = None if saved.weight is None else saved.weight.float() + args.weight_offset
    of_affine = dy if is_before else dy * factor
    ds = _through_rows(of_affine if weight is None else of_affine * weight, normalised)
    dgate = ds * x if is_before else dy * _affine(h, weight, saved.bias)
    grads = (
        ds * factor if is_before else ds,
        dgate * _slope(args.activation, gate) if due[1] else None,
        None if saved.weight is None else over_rows(of_affine * h, saved.weight.dim()),
        None if saved.bias is None else over_rows(of_affine, saved.bias.dim()),
    )
    return rounded(grads, args.dtypes, due)


def _activated(activation: str | GateActivation, gate: torch.Tensor) -> torch.Tensor:
    rising = torch.sigmoid(gate)
    return rising if word(GateActivation, "activation", activation) is GateActivation.SIGMOID else gate * rising


def _slope(activation: str | GateActivation, gate: torch.Tensor) -> torch.Tensor:
    rising = torch.sigmoid(gate)
    if word(GateActivation, "activation", activation) is GateActivation.SIGMOID:
        return rising * (1 - rising)
    return rising * (1 + gate * (1 - rising))


# Modulated norms: y = norm(x * gate + residual) * (1 + scale) + shift.


def modulated(operands: ModulatedOperands, options: ModulatedOptions) -> Any:
    """Return the outputs of `road.normalise` for a modulated call."""
    x, scale, shift, gate, residual, weight, bias = operands
    norm, eps, weight_offset, _, out_dtype, _ = options
    rows = widened(x) if gate is None else widened(x) * _per_sample(gate, x)
    row = (norm, eps, weight_offset, rows.dtype, "after_weight")
    outputs = plain((rows, weight, bias, residual, None), _last_dimension(x), row)
    y, *total = (outputs,) if residual is None else outputs
    y = (y * (1 + _per_sample(scale, x)) + _per_sample(shift, x)).to(out_dtype or x.dtype)
    return (y, *total) if total else y


def _per_sample(operand: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a modulation in the dtype of arithmetic, of a shape that broadcasts to x's."""
    wide = widened(operand)
    if 1 < wide.dim() < x.dim():
        for _ in range(x.dim() - wide.dim()):
            wide = wide.unsqueeze(1)
    return wide


def modulated_gradients(call: BackwardPass) -> list[torch.Tensor | None]:
    """Return the gradients of a modulated call's operands that are due, differentiable; see `modulated`.

    With h the normalised rows, a = h * weight + bias and g = dy * (1 + scale) * weight: ds is what the norm's backward
    pass makes of g, and the gradient that arrives for the sum; dx = ds * gate, dgate = ds * x, dscale = dy * a and
    dshift = dy, summed over the rows that share them.
    """
    saved: ModulatedSaved
    saved, args, dy, dresidual_out, due, *_ = call
    rows = saved.x
    dscale = dshift = dweight = dbias = None
    if dy is None:
        ds = None if dresidual_out is None else dresidual_out.float()
    else:
        normalised = _normalised(rows.float(), saved.mean, saved.rstd)
        h, *_ = normalised
        factor = None if saved.weight is None else saved.weight.float() + args.weight_offset
        dy = dy.float()
        dz = dy * (1 + _per_sample(saved.scale, rows))
        ds = _through_rows(dz if factor is None else dz * factor, normalised, dresidual_out)
        _, for_scale, for_shift, _, _, for_weight, for_bias = due
        dscale = _over_sharing(dy * _affine(h, factor, saved.bias), saved.scale) if for_scale else None
        dshift = _over_sharing(dy, saved.shift) if for_shift else None
        dweight = over_rows(dz * h) if for_weight else None
        dbias = over_rows(dz) if for_bias else None
    dx, dgate = ds, None
    if ds is not None and saved.gate is not None and saved.gated is not None:
        dx = ds * _per_sample(saved.gate, ds) if due[0] else None
        dgate = _over_sharing(ds * saved.gated.float(), saved.gate) if due[3] else None
    return rounded((dx, dscale, dshift, dgate, ds, dweight, dbias), args.dtypes, due)


def _over_sharing(gradient: torch.Tensor, modulation: torch.Tensor) -> torch.Tensor:
    """Sum a gradient over the rows that share a row of a modulation: (N,), (samples, N), or x's own shape."""
    if modulation.dim() == gradient.dim():
        return gradient
    shared = tuple(range(int(modulation.dim() > 1), gradient.dim() - 1))
    return gradient.sum(shared, dtype=torch.float32)


# GroupNorm.


def group(operands: GroupOperands, options: GroupOptions) -> torch.Tensor:
    """Return y of `group.normalise` for the same arguments."""
    x, weight, bias = operands
    _refuse("a GroupNorm", x)
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


def group_gradients(call: BackwardPass) -> list[torch.Tensor | None]:
    """Return the gradients of a call of GroupNorm that are due, differentiable; `group` has the kernels."""
    options: GroupOptions
    (x, weight, bias, statistics), (options, *_), dy, due = call.saved, call.args, call.dy, call.due
    assert dy is not None
    span = Span.of(options.num_groups)
    mean, rstd = statistics.to(widened(x).dtype)

    def as_rows(images: torch.Tensor) -> torch.Tensor:
        """Return the elements that share statistics as the last dimension."""
        if span.is_group:
            return images.reshape(images.shape[0], options.num_groups, -1)
        return images.flatten(2).movedim(1, -1)

    def as_images(rows: torch.Tensor) -> torch.Tensor:
        return (rows if span.is_group else rows.movedim(-1, 1)).reshape(x.shape)

    s = as_rows(widened(x))
    normalised = _normalised(s, mean if span.centres else None, rstd, span.norm.averages, span.norm.clamps)
    h = as_images(normalised.h)
    dz = dy.to(s.dtype)
    if options.activation == "silu":
        z = _per_channel(weight, x) * h + _per_channel(bias, x, 0.0)
        dz = dz * _slope("silu", z)
    dx = as_images(_through_rows(as_rows(dz * _per_channel(weight, x)), normalised))
    others = tuple([dim for dim in range(x.dim()) if dim != 1])
    dweight, dbias = (dz * h).sum(others) if due[1] else None, dz.sum(others) if due[2] else None
    return rounded((dx, dweight, dbias), dtypes_of((x, weight, bias)), due)


def _per_channel(vector: torch.Tensor | None, x: torch.Tensor, absent: float = 1.0) -> torch.Tensor | float:
    """Return a vector of channels in the dtype of arithmetic, of a shape that broadcasts to x's."""
    return absent if vector is None else widened(vector).reshape(-1, *[1] * (x.dim() - 2))


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
    named, eps, interleaved, rotary_dim, weight_offset, cast, height, width, alternates = options
    leading, norm = q.shape[:-2], named.removesuffix(ACROSS_HEADS)
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
        rows = x if norm == named else x.flatten(-2)
        h = _norm(norm, widened(rows), _last_dimension(rows), None, None, eps)
        to = _rounded_to(cast, x.dtype, x.dtype)
        y = _affine(h if to is None else as_stored(h, to), _offset(weight, weight_offset), None).reshape(x.shape)
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


# Second derivatives of every family: torch's operators differentiate the backward formulas above.


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
        A gradient per operand; None where none is due, or the results do not depend on the operand. The gradients are
        differentiable if gradients are enabled.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views of tensors that are in the graph already, or leaves of a graph that ends here.
        inputs = [
            None if operand is None else operand.view_as(operand) if again else operand.detach().requires_grad_(needed)
            for operand, needed in zip(operands, due, strict=True)
        ]
        pairs = [
            (result, gradient)
            for result, gradient in zip(compute(*inputs), arrived, strict=True)
            if result is not None and gradient is not None and result.requires_grad
        ]
    is_due = [operand is not None and needed for operand, needed in zip(inputs, due, strict=True)]
    wanted = [operand for operand, needed in zip(inputs, is_due, strict=True) if operand is not None and needed]
    if not pairs or not wanted:
        return [None] * len(inputs)
    results, gradients = zip(*pairs, strict=True)
    grads = iter(torch.autograd.grad(results, wanted, gradients, create_graph=again, allow_unused=True))
    return [next(grads) if needed else None for needed in is_due]
