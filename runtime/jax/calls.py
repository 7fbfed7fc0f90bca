"""Make operations of the public functions' arguments, and compute them, with gradients unless they quantise."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..codegen.model import Mode
from ..codegen.parameters import FORWARD
from ..codegen.values import FusedAdd, FusedQuant, HeadNorm, Norm
from ..errors import ConflictError, DTypeError, ShapeError
from ..kernels.rotary import check_across, check_columns
from ..upstream.jax_internals import varying
from .operation import DTYPES, Heads, Operation, forward_of, forward_of_heads, gradient_of
from .primitive import apply

_FLOATS = ("float16", "bfloat16", "float32")
_INTEGERS = ("int32", "int64")

# (name, array or None), in the order of the family's inputs.
Operands = Mapping[str, jax.Array]


class Quantised(NamedTuple):
    """The results of a quantised norm.

    Attributes:
        y: x's shape, in out_dtype.
        y_scale: x's shape without the last dimension, in scale_dtype; y * y_scale[..., None] undoes the quantisation.
        residual_out: x + residual in residual's dtype; None without a residual.
    """

    y: jax.Array
    y_scale: jax.Array
    residual_out: jax.Array | None


def _normalised(fadd: FusedAdd, norm: Norm, args: Mapping[str, Any], eps: float, weight_offset: float = 0.0) -> Any:
    """Return y, and the sum too if it is stored; differentiable."""
    operands = _checked(args, weight_offset, ("x", "residual"))
    own, out = (DTYPES[operands[name].dtype.name] for name in ("x", "residual" if fadd.is_after else "x"))
    op, arrays = _operation(Mode(norm, own, out, fadd), operands, eps, weight_offset)
    outputs = (_renormed if fadd.renorms else _differentiable)(op, *arrays)
    return outputs if fadd.stores else outputs[0]


normalised: Callable[..., jax.Array] = partial(_normalised, FusedAdd.NONE)
summed: Callable[..., tuple[jax.Array, jax.Array]] = partial(_normalised, FusedAdd.PRE_ADD_STORE)


def added(norm: Norm, args: Mapping[str, Any], eps: float, next_norm: bool, *options: float) -> Any:
    """Return the sum behind a norm, or y of a second norm and the sum; differentiable."""
    renorms = _flag("next_norm", next_norm) or any(args.get(name) is not None for name in ("next_weight", "next_bias"))
    fadd = FusedAdd.POST_ADD_NORM if renorms else FusedAdd.POST_ADD
    return _normalised(fadd, norm, args, eps, *options)


def quantised(
    norm: Norm, args: Mapping[str, Any], eps: float, out_dtype: Any, scale_dtype: Any, weight_offset: float = 0.0
) -> Quantised:
    """Return the results of a quantised norm."""
    operands = _checked(args, weight_offset)
    mode = Mode(
        norm,
        DTYPES[operands["x"].dtype.name],
        DTYPES[_named("out_dtype", out_dtype, tuple(name for name, dtype in DTYPES.items() if dtype.is_quantised))],
        FusedAdd.PRE_ADD_STORE if "residual" in operands else FusedAdd.NONE,
        FusedQuant.SMOOTH_DYNAMIC if "smooth_scale" in operands else FusedQuant.DYNAMIC,
        scale_dtype=DTYPES[_named("scale_dtype", scale_dtype, _FLOATS)],
    )
    op, arrays = _operation(mode, operands, eps, weight_offset)
    outputs = op.named(apply(*arrays, op=op))
    return Quantised(outputs["y"], outputs["y_scale"], outputs.get("residual_out"))


def rotated(args: Mapping[str, Any], *options: Any) -> tuple[jax.Array, jax.Array]:
    """Return queries and keys, normalised and rotated; differentiable."""
    norm, eps, interleaved, rotary_dim, weight_offset, section, alternates = options
    operands = _arrays(args, ("q", "k", "cos", "sin"))
    q, k, cos = [operands[name] for name in ("q", "k", "cos")]
    for name, each in (("q", q), ("k", k)):
        if each.ndim < 3:
            raise ShapeError(f"{name} has shape {each.shape}; it takes (..., heads, D), tokens before the heads")
    if k.dtype != q.dtype:
        raise DTypeError(f"k has dtype {k.dtype} and q {q.dtype}; pass both in one dtype")
    n = q.shape[-1]
    flags = _flag("interleaved", interleaved), _flag("mrope_interleaved", alternates)
    columns, height, width = check_columns(n, rotary_dim, section, flags[1])
    widths = [columns // 2] if section is not None else [columns // 2, columns]
    if cos.shape[-1:] not in [(width,) for width in widths]:
        takes = " or ".join(map(str, widths))
        raise ShapeError(f"cos has shape {cos.shape}; it takes a last dimension of {takes}")
    if _number("weight_offset", weight_offset) and not {"q_weight", "k_weight"}.issubset(operands):
        raise ConflictError(f"weight_offset={weight_offset} is added to both weights; pass q_weight and k_weight")
    try:
        kind = HeadNorm(norm)
    except ValueError as error:
        raise ConflictError(f"norm={norm!r} is none of {', '.join(each.value for each in HeadNorm)}") from error
    if kind.is_across:
        check_across(norm, max(q.shape[-2], k.shape[-2]), n, columns)
    if height + width:
        operands["positions"] = _by_token(operands.get("positions"))
    mode = Heads(kind.norm, kind.is_across, flags[0], columns, height, width, flags[1])
    op = forward_of_heads(mode, operands, _number("eps", eps, FORWARD["eps"].least), float(weight_offset))
    q_out, k_out = _differentiable(op, *_fitting(op, operands))
    return q_out, k_out


def _by_token(positions: jax.Array | None) -> jax.Array:
    """Return the three positions of each token along the last dimension."""
    if positions is None or positions.shape[:1] != (3,):
        passed = "without positions" if positions is None else f"with positions of shape {positions.shape}"
        raise ShapeError(f"mrope_section was passed {passed}; it takes three rows of them, (3, ...)")
    return jnp.moveaxis(positions, 0, -1)


def _named(name: str, dtype: Any, known: Sequence[str]) -> str:
    try:
        word = str(jnp.dtype(dtype).name)
    except TypeError:
        word = repr(dtype)
    if word not in known:
        raise DTypeError(f"{name} is {word}; it takes {', '.join(known)}")
    return word


def _checked(args: Mapping[str, Any], weight_offset: float, required: Sequence[str] = ("x",)) -> Operands:
    """Return the arrays of a norm, after checking what other arrays say nothing of."""
    arrays = _arrays(args, required)
    rows = arrays["x"].shape
    if not rows or rows[-1] == 0:
        raise ShapeError(f"x has shape {rows}; it takes (..., N), with N of 1 or more")
    if _number("weight_offset", weight_offset) and "weight" not in arrays:
        raise ConflictError(FORWARD["weight_offset"].absent.format(weight_offset=weight_offset))
    return arrays


def _arrays(args: Mapping[str, Any], required: Sequence[str]) -> dict[str, jax.Array]:
    """Return the arrays that were passed; inside `jax.shard_map` each varies over the axes of all."""
    arrays = {name: _array(name, each) for name, each in args.items() if each is not None or name in required}
    return dict(zip(arrays, varying(*arrays.values()), strict=True))


def _fitting(op: Operation, arrays: Operands) -> list[jax.Array]:
    """Return the operands in order, after checking that the sizes of their dimensions agree."""
    shapes = [arrays[each.name].shape for each in op.operands]
    sizes, first = op.sizes(shapes), op.operands[0].name
    for each, shape in zip(op.operands, shapes, strict=True):
        if shape != (takes := each.shape(sizes)):
            raise ShapeError(f"{each.name} has shape {shape}; it takes {takes}, to fit {first} of shape {shapes[0]}")
    return [arrays[each.name] for each in op.operands]


def _array(name: str, value: Any) -> jax.Array:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{name} is of {type(value).__name__}; it takes an array") from error
    takes = _INTEGERS if name == "positions" else _FLOATS
    if array.dtype.name not in takes:
        raise DTypeError(f"{name} has dtype {array.dtype.name}; it takes {', '.join(takes)}")
    return array


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise ConflictError(f"{name}={value!r} is no flag; it takes True or False")
    return bool(value)


def _number(name: str, value: Any, least: float = -math.inf) -> float:
    """Return a finite number that the program is compiled with.

    Raises:
        ConflictError: it is none, is less, or is known only when the program runs.
    """
    plain = isinstance(value, numbers.Real) or (hasattr(value, "item") and not isinstance(value, jax.core.Tracer))
    number = float(value) if plain else math.nan
    if not (math.isfinite(number) and number >= least):
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise ConflictError(f"{name} is {value!r}; it takes a number{bound} that is known when the call is traced")
    return number


def _operation(mode: Mode, operands: Operands, eps: float, weight_offset: float) -> tuple[Operation, list[jax.Array]]:
    """Return the operation of a mode, and its operands in order."""
    dtypes = {name: operand.dtype.name for name, operand in operands.items()}
    op = forward_of(mode, dtypes, _number("eps", eps, FORWARD["eps"].least), float(weight_offset))
    return op, _fitting(op, operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(op: Operation, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Return the results of a forward operation, which has a gradient."""
    return tuple(apply(*operands, op=op))


def _saving(op: Operation, *operands: jax.Array) -> Any:
    """Return the results, and the tensors that the gradient reads."""
    saving = op
    if not isinstance(op.mode, Heads):
        saving = forward_of(replace(op.mode, save_mv=True), op.dtypes, op.eps, op.weight_offset)
    outputs = saving.named(apply(*operands, op=saving))
    tensors = {**dict(zip(op.dtypes, operands, strict=True)), **outputs}
    # A sum is normalised as it is stored.
    tensors["x"] = outputs.get("residual_out", tensors.get("x"))
    kept = {each.name: tensors[each.name] for each in gradient_of(op).operands if each.name in tensors}
    return tuple(outputs[each.name] for each in op.results), kept


def _gradients(op: Operation, kept: dict[str, jax.Array], cotangents: Sequence[jax.Array]) -> tuple[Any, ...]:
    gradient = gradient_of(op)
    tensors = {**kept, **{f"d{name}": each for name, each in op.named(cotangents).items()}}
    tensors |= gradient.named(apply(*[tensors[each.name] for each in gradient.operands], op=gradient))
    return tuple(tensors[each.gradient].astype(each.dtype) if each.gradient else None for each in op.operands)


_differentiable.defvjp(_saving, _gradients)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _renormed(op: Operation, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Return the results of two norms around an add, by one operation unless they are differentiated."""
    return tuple(apply(*operands, op=op))


def _apart(op: Operation, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the same results by an operation for each norm."""
    given = dict(zip(op.dtypes, operands, strict=True))
    second = {name: given.pop(f"next_{name}") for name in ("weight", "bias") if f"next_{name}" in given}
    own, about = DTYPES[given["residual"].dtype.name], (op.eps, op.weight_offset)
    first, arrays = _operation(replace(op.mode, dtype_out=own, fadd=FusedAdd.POST_ADD), given, *about)
    (total,) = _differentiable(first, *arrays)
    again, arrays = _operation(replace(op.mode, dtype_in=own, fadd=FusedAdd.NONE), {"x": total, **second}, *about)
    return _differentiable(again, *arrays)[0], total


_renormed.defvjp(
    lambda op, *operands: jax.vjp(partial(_apart, op), *operands), lambda op, pull, arriving: pull(tuple(arriving))
)
