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

from ..codegen.groups import Activation, GroupMode, Span
from ..codegen.model import Mode
from ..codegen.parameters import FORWARD
from ..codegen.values import FusedAdd, FusedQuant, HeadNorm, Norm
from ..errors import ConflictError, DTypeError, GradientError, ShapeError
from ..kernels.rotary import check_across, check_columns
from ..upstream.jax_internals import varying
from .operation import DTYPES, Heads, Operation, forward_of, forward_of_heads, gradient_of, joined, saving_of
from .primitive import apply

_FLOATS = ("float16", "bfloat16", "float32")
_INTEGERS = ("int32", "int64")

# Arguments by name.
Operands = Mapping[str, Any]


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


# An operation, and its operands in order.
Prepared = tuple[Operation, list[jax.Array]]


def normalising(fadd: FusedAdd, norm: Norm, args: Operands, eps: float, offset: float = 0.0) -> Prepared:
    """Return the operation of a norm, of a sum or not."""
    operands = _checked(args, offset, ("x", "residual") if fadd.adds else ("x",))
    own, out = (DTYPES[operands[name].dtype.name] for name in ("x", "residual" if fadd.is_after else "x"))
    return _operation(Mode(norm, own, out, fadd), operands, eps, offset)


def _over(norm: Norm, args: Operands, eps: float, dim: int, activation: Any, offset: float = 0.0) -> Prepared:
    """Return the operation of a norm over the last dimension, or over channels."""
    applied, is_over_channels = _member(Activation, "activation", activation or "none"), dim == 1
    if dim not in (-1, 1):
        raise ConflictError(f"dim is {dim!r}; it takes -1, the last dimension, or 1, the channels of (B, C, ...)")
    if applied.is_applied and not is_over_channels:
        raise ConflictError(f"activation is {activation!r}, and dim -1; use dim=1, or leave activation out")
    if offset and is_over_channels:
        raise ConflictError(f"weight_offset is {offset}, and goes with dim=-1; leave it out with dim=1")
    operands = _checked(args, offset)
    dtype, dims = operands["x"].dtype.name, operands["x"].ndim
    if is_over_channels and dims < 2:
        raise ShapeError(f"x has shape {operands['x'].shape}; with dim=1 it takes (B, C, ...), at least 2 dimensions")
    # Channels that lie last are rows.
    if not applied.is_applied and (dims == 2 or not is_over_channels):
        return normalising(FusedAdd.NONE, norm, args, eps, offset)
    mode = GroupMode(DTYPES[dtype], activation=applied, span=Span.over(norm))
    op, arrays = _operation(mode, operands, eps, 0.0, "".join([f" s{at}" for at in range(dims - 2)]))
    return op.without(("mean", "rstd")), arrays


def quantising(norm: Norm, args: Operands, eps: float, out: Any, scale: Any, offset: float = 0.0) -> Prepared:
    """Return the operation of a quantised norm; `out` and `scale` are the dtypes of y and of y_scale."""
    operands, known = _checked(args, offset), [name for name, dtype in DTYPES.items() if dtype.is_quantised]
    own, out = DTYPES[operands["x"].dtype.name], DTYPES[_named("out_dtype", out, known)]
    fadd = FusedAdd.PRE_ADD_STORE if "residual" in operands else FusedAdd.NONE
    fquant = FusedQuant.SMOOTH_DYNAMIC if "smooth_scale" in operands else FusedQuant.DYNAMIC
    mode = Mode(norm, own, out, fadd, fquant, scale_dtype=DTYPES[_named("scale_dtype", scale, _FLOATS)])
    op, arrays = _operation(mode, operands, eps, offset)
    return op, [*map(_undifferentiated, arrays)]


def results_of(*prepared: Prepared) -> list[Any]:
    """Return the results of public functions, of one or of several in one launch; differentiable.

    Inside `jax.shard_map` each operand varies over the axes of all.
    """
    op = joined([each for each, _ in prepared])
    outputs = _differentiable(op, *varying(*[array for _, arrays in prepared for array in arrays]))
    return [_returned(part.named(own)) for part, own in op.shares(outputs, "results")]


def _returned(made: Mapping[str, jax.Array]) -> Any:
    if "y_scale" in made:
        return Quantised(made["y"], made["y_scale"], made.get("residual_out"))
    return tuple(made.values()) if len(made) > 1 else next(iter(made.values()))


def _alone(prepare: Callable[..., Prepared], *args: Any) -> Any:
    return results_of(prepare(*args))[0]


normalised: Callable[..., jax.Array] = partial(_alone, _over)
summed: Callable[..., tuple[jax.Array, jax.Array]] = partial(_alone, normalising, FusedAdd.PRE_ADD_STORE)
quantised: Callable[..., Quantised] = partial(_alone, quantising)


def added(norm: Norm, args: Operands, eps: float, next_norm: bool, *options: float) -> Any:
    """Return the sum behind a norm, or y of a second norm and the sum; differentiable."""
    renorms = _flag("next_norm", next_norm) or any(args.get(name) is not None for name in ("next_weight", "next_bias"))
    fadd = FusedAdd.POST_ADD_NORM if renorms else FusedAdd.POST_ADD
    return _alone(normalising, fadd, norm, args, eps, *options)


def measured(norm: Norm, args: Operands, eps: float) -> Any:
    """Return the statistics of rows, whose derivatives are those of the formula."""
    operands = _checked(args, 0.0)
    own = DTYPES[operands["x"].dtype.name]
    op, arrays = _operation(Mode(norm, own, own, save_mv=True, statistics_only=True), operands, eps, 0.0)
    return _returned(op.named(apply(*arrays, op=op)))


def rotating(args: Operands, *options: Any) -> Prepared:
    """Return the operation of queries and keys, normalised and rotated."""
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
    kind = _member(HeadNorm, "norm", norm)
    if kind.is_across:
        check_across(norm, max(q.shape[-2], k.shape[-2]), n, columns)
    if height + width:
        positions = operands.get("positions")
        if positions is None or positions.shape[:1] != (3,):
            passed = "without positions" if positions is None else f"with positions of shape {positions.shape}"
            raise ShapeError(f"mrope_section was passed {passed}; it takes three rows of them, (3, ...)")
        operands["positions"] = jnp.moveaxis(positions, 0, -1)
    mode = Heads(kind.norm, kind.is_across, flags[0], columns, height, width, flags[1])
    op = forward_of_heads(mode, operands, _number("eps", eps, FORWARD["eps"].least), float(weight_offset))
    return op, _fitting(op, operands)


rotated: Callable[..., tuple[jax.Array, jax.Array]] = partial(_alone, rotating)


def _named(name: str, dtype: Any, known: Sequence[str]) -> str:
    try:
        word = str(jnp.dtype(dtype).name)
    except TypeError:
        word = repr(dtype)
    if word not in known:
        raise DTypeError(f"{name} is {word}; it takes {', '.join(known)}")
    return word


def _checked(args: Operands, weight_offset: float, required: Sequence[str] = ("x",)) -> Operands:
    """Return the arrays of a norm, after checking what other arrays say nothing of."""
    arrays = _arrays(args, required)
    rows = arrays["x"].shape
    if not rows or rows[-1] == 0:
        raise ShapeError(f"x has shape {rows}; it takes (..., N), with N of 1 or more")
    if _number("weight_offset", weight_offset) and "weight" not in arrays:
        raise ConflictError(FORWARD["weight_offset"].absent.format(weight_offset=weight_offset))
    return arrays


def _arrays(args: Operands, required: Sequence[str]) -> dict[str, jax.Array]:
    """Return the arrays that were passed."""
    return {name: _array(name, each) for name, each in args.items() if each is not None or name in required}


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


def _member(words: Any, name: str, value: Any) -> Any:
    """Return the member of an enum that a word names."""
    try:
        return words(value)
    except ValueError as error:
        raise ConflictError(f"{name}={value!r} is none of {', '.join(each.value for each in words)}") from error


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


def _operation(mode: Any, operands: Operands, eps: float, weight_offset: float, space: str = "") -> Prepared:
    """Return the operation of a mode, and its operands in order."""
    dtypes = {name: operand.dtype.name for name, operand in operands.items()}
    op = forward_of(mode, dtypes, _number("eps", eps, FORWARD["eps"].least), float(weight_offset), space)
    return op, _fitting(op, operands)


def _refused(*about: Any) -> Any:
    raise GradientError(
        "a quantised norm has no gradient; differentiate normforge.jax.layer_norm or rms_norm, or put "
        "jax.lax.stop_gradient around its operands"
    )


# The operands of quantised norms pass through this function.
_undifferentiated: Any = jax.custom_jvp(lambda array: array)
_undifferentiated.defjvp(_refused)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(op: Operation, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Return the results of a forward operation, which has a gradient unless it quantises."""
    return tuple(apply(*operands, op=op))


def _saving(op: Operation, *operands: jax.Array) -> Any:
    """Return the results, and what each norm's gradient reads, or a function of the gradients of two norms."""
    if isinstance(op.mode, Mode) and op.mode.fadd.renorms:
        return jax.vjp(partial(_apart, op), *operands)
    saving = joined([saving_of(part) for part in op.parts])
    outputs = saving.shares(apply(*operands, op=saving), "results")
    results, kept = [], []
    for (part, own), (saved, made) in zip(op.shares(operands), outputs, strict=True):
        tensors = {**dict(zip(part.dtypes, own, strict=True)), **saved.named(made)}
        results += [tensors[each.name] for each in part.results]
        # A sum is normalised as it is stored.
        tensors["x"] = tensors.get("residual_out", tensors.get("x"))
        reads = gradient_of(part).operands if part.operands[0].gradient else ()
        kept.append({each.name: tensors[each.name] for each in reads if each.name in tensors})
    return tuple(results), kept


def _gradients(op: Operation, kept: Any, cotangents: Sequence[jax.Array]) -> tuple[Any, ...]:
    if callable(kept):
        return tuple(kept(tuple(cotangents)))
    grads = []
    for own, (part, arrived) in zip(kept, op.shares(cotangents, "results"), strict=True):
        gradient = gradient_of(part)
        tensors = {**own, **{f"d{name}": each for name, each in part.named(arrived).items()}}
        if own:
            tensors |= gradient.named(apply(*[tensors[each.name] for each in gradient.operands], op=gradient))
        grads += [tensors[each.gradient].astype(each.dtype) if each.gradient else None for each in part.operands]
    return tuple(grads)


def _apart(op: Operation, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the results of two norms around an add by an operation for each norm."""
    given = dict(zip(op.dtypes, operands, strict=True))
    second = {name: given.pop(f"next_{name}") for name in ("weight", "bias") if f"next_{name}" in given}
    own, about = DTYPES[given["residual"].dtype.name], (op.eps, op.weight_offset)
    first, arrays = _operation(replace(op.mode, dtype_out=own, fadd=FusedAdd.POST_ADD), given, *about)
    (total,) = _differentiable(first, *arrays)
    again, arrays = _operation(replace(op.mode, dtype_in=own, fadd=FusedAdd.NONE), {"x": total, **second}, *about)
    return _differentiable(again, *arrays)[0], total


_differentiable.defvjp(_saving, _gradients)
