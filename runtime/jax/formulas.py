"""The norms and their gradients in jax.numpy: they run where no kernel does, and second derivatives use them.

Arithmetic is fp32, or fp64 if any operand is, with one rounding at the end, as docs/reference/numerics.md has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from ..codegen.groups import GroupMode
from .operation import NAMES, Heads, Operation


def computed(*operands: jax.Array, op: Operation) -> list[jax.Array]:
    """Return the results of an operation."""
    if len(op.parts) > 1:
        return [each for part, own in op.shares(operands) for each in computed(*own, op=part)]
    # A caller may have forbidden what the formula is written with.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        args = {own.name: _widened(operand) for own, operand in zip(op.operands, operands, strict=True)}
        outputs = (_gradients if op.mode.is_backward else _forward(op))(op, args)
        return [outputs[each.name].astype(each.dtype) for each in op.results]


def _widened(operand: jax.Array) -> jax.Array:
    is_float = jnp.issubdtype(operand.dtype, jnp.floating)
    return operand.astype(jnp.promote_types(operand.dtype, jnp.float32)) if is_float else operand


def _as_stored(total: jax.Array, dtype: str) -> jax.Array:
    """Round a sum to the dtype it is stored in, and widen it again; gradients see no rounding."""
    # Without the barrier XLA may take both conversions for none. An infinite sum less itself is NaN.
    rounding = jax.lax.optimization_barrier(total.astype(dtype)).astype(total.dtype) - total
    return total + jax.lax.stop_gradient(jnp.nan_to_num(rounding, posinf=jnp.inf, neginf=-jnp.inf))


def _forward(op: Operation) -> Callable[[Operation, Mapping[str, jax.Array]], dict[str, jax.Array]]:
    return {Heads: _turned, GroupMode: _over_channels}.get(type(op.mode), _outputs)


def _outputs(op: Operation, args: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    total, is_behind = args["x"], op.mode.fadd.is_after or op.mode.fadd.renorms
    if "residual" in args and not is_behind:
        total = _as_stored(total + args["residual"], op.dtypes["residual"])
    outputs = _normalised(op, total, args)
    if is_behind:
        outputs["y"] += args["residual"]
    if op.mode.fadd.renorms:
        total = _as_stored(outputs["y"], op.dtypes["residual"])
        second = {name.removeprefix("next_"): vector for name, vector in args.items() if name.startswith("next_")}
        outputs = _normalised(op, total, second)
    if op.mode.fquant.quantises:
        z = outputs["y"] * args["smooth_scale"] if "smooth_scale" in args else outputs["y"]
        outputs["y"], outputs["y_scale"] = _quantised(op, z)
    return {**outputs, "residual_out": total}


def _over_channels(op: Operation, args: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the norm of the channels at each position, activated, with its statistics."""
    at = -1 - len(op.space.split())
    outputs = _normalised(replace(op, mode=op.mode.span), jnp.moveaxis(args["x"], at, -1), args)
    y = jax.nn.silu(outputs["y"]) if op.mode.activation.is_applied else outputs["y"]
    # Kernels store a mean of 0 where the norm subtracts none.
    return {"mean": jnp.zeros_like(outputs["rstd"]), **outputs, "y": jnp.moveaxis(y, -1, at)}


def _normalised(op: Operation, total: jax.Array, args: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the norm of rows, with their statistics."""
    outputs, centred = {}, total
    if op.mode.norm.centres:
        outputs["mean"] = mean = jnp.mean(total, axis=-1)
        centred = total - mean[..., None]
    square = (jnp.mean if op.mode.norm.row.averages else jnp.sum)(centred * centred, axis=-1)
    clamps, least = op.mode.norm.clamps, op.eps**2
    rstd = 1 / jnp.sqrt(jnp.maximum(square, least) if clamps else square + op.eps)
    outputs["rstd"] = jnp.where(square < least, -rstd, rstd) if clamps else rstd
    y = centred * rstd[..., None]
    if "weight" in args:
        y = y * (args["weight"] + op.weight_offset)
    return {**outputs, "y": y + args["bias"] if "bias" in args else y}


def _gradients(op: Operation, args: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the gradients of the forward formula, which computes statistics again."""
    arrived = {name.removeprefix("d"): each for name, each in args.items() if name.startswith("d")}

    def results(own: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        outputs = _forward(op)(op, {**args, **own})
        return {name: outputs[name] for name in arrived}

    first, *_ = args.values()
    # No operand of the gradients is the bias, whose values they do not depend on.
    bias = jax.lax.full_like(first, 0, shape=op.operands[0].sizes(first.shape).get("N", ()))
    names = [each.name.removeprefix("d") for each in op.results]
    (grads,) = jax.vjp(results, {name: args.get(name, bias) for name in names})[1](arrived)
    return {f"d{name}": each for name, each in grads.items()}


def _quantised(op: Operation, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows divided by the scale that is stored of each, saturated, of integers rounded to even; and the scales."""
    dtype = op.mode.dtype_out
    amax = jnp.max(jnp.abs(z), axis=-1)
    scale = jnp.where(amax == 0, 1, amax / dtype.qmax).astype(NAMES[op.mode.scale_dtype])
    q = jnp.clip(z / scale.astype(z.dtype)[..., None], -dtype.qmax, dtype.qmax)
    return jnp.round(jnp.nan_to_num(q, nan=-dtype.qmax)) if dtype.is_int else q, scale


def _turned(op: Operation, args: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return queries and keys, normalised and rotated."""
    columns, adjoin = op.mode.rotary_dim, op.mode.interleaved
    angles = [_pairs(op.mode, _by_token(op.mode, args[name], args.get("positions"))) for name in ("cos", "sin")]
    (cos_first, cos_second), (sin_first, sin_second) = angles
    outputs = {}
    for own in "qk":
        x, weight = args[own], f"{own}_weight"
        rows = x.reshape(*x.shape[:-2], -1) if op.mode.is_across else x
        y = _normalised(op, rows, {"weight": args[weight]} if weight in args else {})["y"].reshape(x.shape)
        first, second = _pairs(op.mode, y[..., :columns])
        turned = first * cos_first - second * sin_first, second * cos_second + first * sin_second
        joined = jnp.stack(turned, -1 if adjoin else -2).reshape(*x.shape[:-1], columns)
        outputs[f"{own}_out"] = jnp.concatenate((joined, y[..., columns:]), -1)
    return outputs


def _pairs(mode: Heads, columns: jax.Array) -> tuple[jax.Array, ...]:
    """Return the first column of all pairs, and the second; tables may have one column for both."""
    if columns.shape[-1] < mode.rotary_dim:
        return columns, columns
    return (columns[..., ::2], columns[..., 1::2]) if mode.interleaved else tuple(jnp.split(columns, 2, -1))


def _by_token(mode: Heads, table: jax.Array, positions: jax.Array | None) -> jax.Array:
    """Return a token's row of a table for each of its heads."""
    if positions is not None and mode.height + mode.width:
        pairs = jnp.arange(mode.rotary_dim // 2)
        axis = jnp.where(pairs < 3 * jnp.where(pairs % 3 == 1, mode.height, mode.width), pairs % 3, 0)
        if not mode.alternates:
            axis = (pairs >= len(pairs) - mode.height - mode.width) * 1 + (pairs >= len(pairs) - mode.width)
        table = table[positions[..., axis], pairs]
    elif positions is not None:
        table = table[positions]
    return table[..., None, :]
