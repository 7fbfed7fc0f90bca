"""Operations and operands for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from normforge.codegen.model import Mode
from normforge.codegen.values import DType, FusedAdd, FusedQuant, Norm
from normforge.jax.calls import _checked, _operation
from normforge.jax.operation import NAMES, Operation, gradient_of

from .settled import jax

jnp = jax.numpy


def arrays(seed: int, shape: tuple[int, ...], dtype: Any = "float32", n: int = 1) -> list[Any]:
    """Random arrays."""
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.standard_normal(shape), dtype) for _ in range(n)]


def forward(
    norm: Norm,
    shape: tuple[int, ...],
    dtype: DType = DType.FP32,
    *,
    affine: bool = True,
    biased: bool = True,
    adds: bool = False,
    quantised: DType | None = None,
    smooths: bool = False,
    saves: bool = False,
) -> tuple[Operation, list[Any]]:
    """A forward operation and operands of it."""
    x, residual = arrays(1, shape, NAMES[dtype], 2)
    weight, bias, smooth = arrays(2, shape[-1:], "float32", 3)
    given = {
        "x": x,
        "residual": residual if adds else None,
        "weight": weight if affine else None,
        "bias": bias if affine and biased and norm.centres else None,
        "smooth_scale": smooth if smooths else None,
    }
    fquant = FusedQuant.NONE if quantised is None else FusedQuant.SMOOTH_DYNAMIC if smooths else FusedQuant.DYNAMIC
    fadd = FusedAdd.PRE_ADD_STORE if adds else FusedAdd.NONE
    mode = Mode(norm, dtype, quantised or dtype, fadd, fquant, save_mv=saves)
    offset = 1.0 if affine and not norm.centres else 0.0
    return _operation(mode, _checked(given, offset), 1e-5, offset)


def backward(
    norm: Norm,
    shape: tuple[int, ...],
    dtype: DType = DType.FP32,
    *,
    affine: bool = True,
    biased: bool = True,
    adds: bool = False,
) -> tuple[Operation, list[Any]]:
    """A gradient's operation and operands of it."""
    op, operands = forward(norm, shape, dtype, affine=affine, biased=biased, adds=adds)
    gradient = gradient_of(op)
    x, dy, dresidual_out = arrays(3, shape, NAMES[dtype], 3)
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, -1)
    given = {
        "dy": dy,
        "x": x,
        "dresidual_out": dresidual_out,
        "mean": mean,
        "rstd": 1 / jnp.sqrt(jnp.mean((wide - (mean[..., None] if norm.centres else 0)) ** 2, -1) + 1e-5),
        **{name: operand for (name, _), operand in zip(op.operands[1:], operands[1:], strict=True)},
    }
    return gradient, [given[name] for name, _ in gradient.operands]
