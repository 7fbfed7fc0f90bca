"""Differentiable norms of JAX arrays, fused with the residual add before them, and quantised ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..codegen.families import Kind
from ..codegen.model import Mode
from ..codegen.parameters import FORWARD
from ..codegen.values import FusedAdd, FusedQuant, Norm
from ..errors import ConflictError, DTypeError
from ..upstream.jax_internals import varying
from .checks import FLOATS, number_of, rows_of, vector_of
from .operation import DTYPES, Operation, forward_of, gradient_of
from .primitive import apply

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


def layer_norm(
    x: jax.Array, weight: jax.Array | None = None, bias: jax.Array | None = None, eps: float = 1e-5
) -> jax.Array:
    """LayerNorm over x's last dimension.

    y = (x - mean) / sqrt(var + eps) * weight + bias, with the biased variance (Ba et al., 2016), in fp32 with one
    rounding at the end. On an NVIDIA GPU a kernel runs, forward and backward, and two runs give the same bits; anywhere
    else the same formula in jax.numpy. It is differentiated in reverse mode; a gradient's gradient is that of the
    formula. vmap joins rows to those of one launch, but where weight or bias is mapped over. Arrays that are sharded
    along leading dimensions are normalised where they lie, and the gradients of weight and bias are added up over the
    devices; N is gathered.

    Args:
        x: (..., N), float16, bfloat16 or float32.
        weight: (N,), float16, bfloat16 or float32, or None for 1.
        bias: (N,), float16, bfloat16 or float32, or None for 0.
        eps: added to the variance; a number, and no array that is traced.

    Returns:
        y: x's shape and dtype.

    Raises:
        ShapeError: x has no columns, or weight or bias another shape than (N,).
        DTypeError: an array is of another type.
        ConflictError: eps is no number of at least 0.
        NormforgeError: when the program is lowered for a GPU: JaxError where jaxlib is not one that kernels are
            launched through, CompileError, AotError and FrozenError where a kernel cannot be had.
    """
    (y,) = _differentiable(Norm.LAYER, {"x": x, "weight": weight, "bias": bias}, eps)
    return y


def rms_norm(
    x: jax.Array, weight: jax.Array | None = None, eps: float = 1e-6, *, weight_offset: float = 0.0
) -> jax.Array:
    """RMSNorm over x's last dimension.

    y = x / sqrt(mean(x**2) + eps) * (weight + weight_offset) (Zhang and Sennrich, 2019). All else is as in
    `layer_norm`.

    Args:
        x: see `layer_norm`.
        weight: see `layer_norm`.
        eps: added to the mean square.
        weight_offset: added to every weight, in fp32; 1.0 for Gemma's norms.

    Returns:
        y: x's shape and dtype.

    Raises:
        ConflictError: weight_offset has no weight to be added to.
        NormforgeError: one of those that `layer_norm` lists.
    """
    (y,) = _differentiable(Norm.RMS, {"x": x, "weight": weight}, eps, weight_offset)
    return y


def add_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
) -> tuple[jax.Array, jax.Array]:
    """LayerNorm of x + residual, and the sum; the norm is of the sum as it is returned.

    Args:
        x: see `layer_norm`, as for every argument not described here.
        residual: x's shape, float16, bfloat16 or float32.
        weight: see `layer_norm`.
        bias: see `layer_norm`.
        eps: see `layer_norm`.

    Returns:
        y: x's shape and dtype.
        residual_out: x + residual, in residual's dtype.

    Raises:
        NormforgeError: one of those that `layer_norm` lists.
    """
    y, total = _differentiable(Norm.LAYER, {"x": x, "residual": residual, "weight": weight, "bias": bias}, eps)
    return y, total


def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """RMSNorm of x + residual, and the sum; see `add_layer_norm` and `rms_norm`."""
    y, total = _differentiable(Norm.RMS, {"x": x, "residual": residual, "weight": weight}, eps, weight_offset)
    return y, total


def quantised_layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
    *,
    residual: jax.Array | None = None,
    smooth_scale: jax.Array | None = None,
    out_dtype: Any = jnp.int8,
    scale_dtype: Any = jnp.float32,
) -> Quantised:
    """LayerNorm of x, or of x + residual, quantised by each row's largest magnitude.

    y_scale = max|z| / qmax of z = y * smooth_scale, y = round(z / y_scale) in fp32 from the unrounded norm: int8 to
    nearest even within ±127, fp8 saturated. A row of zeros has y_scale 1. There is no gradient.

    Args:
        x: see `layer_norm`, as for every argument not described here.
        weight: see `layer_norm`.
        bias: see `layer_norm`.
        eps: see `layer_norm`.
        residual: x's shape, float16, bfloat16 or float32, added before the norm.
        smooth_scale: (N,), float16, bfloat16 or float32, of any sign, or None for 1.
        out_dtype: int8, float8_e4m3fn, float8_e4m3fnuz or float8_e5m2.
        scale_dtype: float32, float16 or bfloat16.

    Raises:
        DTypeError: out_dtype or scale_dtype is none of those.
        GradientError: it is differentiated.
        NormforgeError: one of those that `layer_norm` lists.
    """
    given = {"x": x, "residual": residual, "weight": weight, "bias": bias, "smooth_scale": smooth_scale}
    return _quantised(Norm.LAYER, given, eps, 0.0, out_dtype, scale_dtype)


def quantised_rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    eps: float = 1e-6,
    *,
    residual: jax.Array | None = None,
    smooth_scale: jax.Array | None = None,
    out_dtype: Any = jnp.int8,
    scale_dtype: Any = jnp.float32,
    weight_offset: float = 0.0,
) -> Quantised:
    """RMSNorm of x, or of x + residual, quantised per row; see `quantised_layer_norm` and `rms_norm`."""
    given = {"x": x, "residual": residual, "weight": weight, "smooth_scale": smooth_scale}
    return _quantised(Norm.RMS, given, eps, weight_offset, out_dtype, scale_dtype)


def _differentiable(
    norm: Norm, given: Mapping[str, Any], eps: float, weight_offset: float = 0.0
) -> tuple[jax.Array, ...]:
    operands = _checked(given, weight_offset)
    own = DTYPES[operands["x"].dtype.name]
    fadd = FusedAdd.PRE_ADD_STORE if "residual" in operands else FusedAdd.NONE
    op, arrays = _operation(Mode(norm, own, own, fadd), operands, eps, weight_offset)
    outputs: tuple[jax.Array, ...] = _norm_of(op, tuple(array.dtype.name for array in arrays))(*arrays)
    return outputs


def _quantised(
    norm: Norm, given: Mapping[str, Any], eps: float, weight_offset: float, out_dtype: Any, scale_dtype: Any
) -> Quantised:
    operands = _checked(given, weight_offset)
    mode = Mode(
        norm,
        DTYPES[operands["x"].dtype.name],
        DTYPES[_named("out_dtype", out_dtype, tuple(name for name, dtype in DTYPES.items() if dtype.is_quantised))],
        FusedAdd.PRE_ADD_STORE if "residual" in operands else FusedAdd.NONE,
        FusedQuant.SMOOTH_DYNAMIC if "smooth_scale" in operands else FusedQuant.DYNAMIC,
        scale_dtype=DTYPES[_named("scale_dtype", scale_dtype, FLOATS)],
    )
    op, arrays = _operation(mode, operands, eps, weight_offset)
    made = op.named(apply(op, *arrays))
    return Quantised(made["y"], made["y_scale"], made.get("residual_out"))


def _named(name: str, dtype: Any, known: Sequence[str]) -> str:
    try:
        word = str(jnp.dtype(dtype).name)
    except TypeError:
        word = repr(dtype)
    if word not in known:
        raise DTypeError(f"{name} is {word}; it takes {', '.join(known)}")
    return word


def _checked(given: Mapping[str, Any], weight_offset: float) -> Operands:
    """Check the arrays and return them; inside `jax.shard_map` each varies over the axes of all."""
    x = rows_of("x", given["x"])
    arrays = {
        name: rows_of(name, value, x.shape) if FORWARD[name].kind is Kind.ROWS else vector_of(name, value, x.shape[-1])
        for name, value in given.items()
        if value is not None
    }
    if number_of("weight_offset", weight_offset) and "weight" not in arrays:
        raise ConflictError(FORWARD["weight_offset"].absent.format(weight_offset=weight_offset))
    return dict(zip(arrays, varying(*arrays.values()), strict=True))


def _operation(mode: Mode, operands: Operands, eps: float, weight_offset: float) -> tuple[Operation, list[jax.Array]]:
    """Return the operation of a mode, and its operands in order."""
    dtypes = {name: operand.dtype.name for name, operand in operands.items()}
    op = forward_of(mode, dtypes, number_of("eps", eps, FORWARD["eps"].least), float(weight_offset))
    return op, [operands[name] for name in op.operands]


@cache
def _norm_of(op: Operation, dtypes: tuple[str, ...]) -> Any:
    """Return an operation as a function with a gradient; `dtypes` are those of its operands."""
    own = dict(zip(op.operands, dtypes, strict=True))
    saving = forward_of(replace(op.mode, save_mv=True), own, op.eps, op.weight_offset)
    summed = [own[name] for name in ("x", "residual") if name in own]
    with jax.numpy_dtype_promotion("standard"):
        dx_dtype = str(jnp.result_type(*summed).name)

    def plain(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(apply(op, *operands))

    def forward(*operands: jax.Array) -> Any:
        made = saving.named(apply(saving, *operands))
        given = dict(zip(op.operands, operands, strict=True))
        kept = {name: each for name, each in {**given, **made}.items() if name in ("weight", "mean", "rstd")}
        kept["x"] = made.get("residual_out", given["x"])
        return tuple(made[name] for name, _ in op.results), kept

    def backward(kept: dict[str, jax.Array], cotangents: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        arrived = op.named(cotangents)
        adds = "residual_out" in arrived
        tensors = {**kept, "dy": arrived["y"], "dresidual_out": arrived.get("residual_out")}
        gradient = gradient_of(op, {**own, "rows": kept["x"].dtype.name}, dx_dtype, adds)
        found = gradient.named(apply(gradient, *[tensors[name] for name in gradient.operands]))
        found["dresidual"] = found["dx"]
        return tuple(found[f"d{name}"].astype(dtype) for name, dtype in own.items())

    norm = jax.custom_vjp(plain)
    norm.defvjp(forward, backward)
    return norm
