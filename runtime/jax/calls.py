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
from ..codegen.values import FusedAdd, FusedQuant, Norm
from ..errors import ConflictError, DTypeError, ShapeError
from ..upstream.jax_internals import varying
from .operation import DTYPES, Operation, forward_of, gradient_of
from .primitive import apply

_FLOATS = ("float16", "bfloat16", "float32")

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
    if not isinstance(next_norm, int) or next_norm not in (0, 1):
        raise ConflictError(f"next_norm={next_norm!r} is no flag; it takes True or False")
    renorms = bool(next_norm) or any(args.get(name) is not None for name in ("next_weight", "next_bias"))
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


def _named(name: str, dtype: Any, known: Sequence[str]) -> str:
    try:
        word = str(jnp.dtype(dtype).name)
    except TypeError:
        word = repr(dtype)
    if word not in known:
        raise DTypeError(f"{name} is {word}; it takes {', '.join(known)}")
    return word


def _checked(args: Mapping[str, Any], weight_offset: float, required: Sequence[str] = ("x",)) -> Operands:
    """Check the arrays and return them; inside `jax.shard_map` each varies over the axes of all."""
    arrays = {name: _array(name, each) for name, each in args.items() if each is not None or name in required}
    rows = arrays["x"].shape
    if not rows or rows[-1] == 0:
        raise ShapeError(f"x has shape {rows}; it takes (..., N), with N of 1 or more")
    for name, array in arrays.items():
        has_rows = name in ("x", "residual")
        shape, whose = (rows, "x's shape") if has_rows else (rows[-1:], "x's last dimension")
        if array.shape != shape:
            raise ShapeError(f"{name} has shape {array.shape}; it takes {shape}, {whose}")
    if _number("weight_offset", weight_offset) and "weight" not in arrays:
        raise ConflictError(FORWARD["weight_offset"].absent.format(weight_offset=weight_offset))
    return dict(zip(arrays, varying(*arrays.values()), strict=True))


def _array(name: str, value: Any) -> jax.Array:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{name} is of {type(value).__name__}; it takes an array") from error
    if array.dtype.name not in _FLOATS:
        raise DTypeError(f"{name} has dtype {array.dtype.name}; it takes {', '.join(_FLOATS)}")
    return array


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
    return op, [operands[name] for name, _ in op.operands]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(op: Operation, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Return the results of a forward operation, which has a gradient."""
    return tuple(apply(*operands, op=op))


def _saving(op: Operation, *operands: jax.Array) -> Any:
    """Return the results, and the tensors that the gradient reads."""
    saving = forward_of(replace(op.mode, save_mv=True), dict(op.operands), op.eps, op.weight_offset)
    outputs = saving.named(apply(*operands, op=saving))
    tensors = {row.name: operand for row, operand in zip(op.inputs, operands, strict=True)} | outputs
    tensors["x"] = outputs.get("residual_out", tensors["x"])
    kept = {name: tensors[name] for name, _ in gradient_of(op).operands if name in tensors}
    return tuple(outputs[name] for name, _ in op.results), kept


def _gradients(op: Operation, kept: dict[str, jax.Array], cotangents: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    gradient = gradient_of(op)
    tensors = {**kept, **{f"d{name}": each for name, each in op.named(cotangents).items()}}
    grads = gradient.named(apply(*[tensors[name] for name, _ in gradient.operands], op=gradient))
    names = {row.name: row.gradient for row in op.inputs}
    if op.mode.fadd.is_after:
        names["residual"], grads["dy"] = "dy", tensors["dy"]
    return tuple(grads[names[name]].astype(dtype) for name, dtype in op.operands)


_differentiable.defvjp(_saving, _gradients)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _renormed(op: Operation, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Return the results of two norms around an add, by one operation unless they are differentiated."""
    return tuple(apply(*operands, op=op))


def _apart(op: Operation, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the same results by an operation for each norm."""
    given = dict(zip([name for name, _ in op.operands], operands, strict=True))
    second = {name: given.pop(f"next_{name}") for name in ("weight", "bias") if f"next_{name}" in given}
    own, about = DTYPES[given["residual"].dtype.name], (op.eps, op.weight_offset)
    first, arrays = _operation(replace(op.mode, dtype_out=own, fadd=FusedAdd.POST_ADD), given, *about)
    (total,) = _differentiable(first, *arrays)
    again, arrays = _operation(replace(op.mode, dtype_in=own, fadd=FusedAdd.NONE), {"x": total, **second}, *about)
    return _differentiable(again, *arrays)[0], total


_renormed.defvjp(
    lambda op, *operands: jax.vjp(partial(_apart, op), *operands), lambda op, pull, arriving: pull(tuple(arriving))
)
