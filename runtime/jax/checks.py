"""Checks of operands, with the errors that name a wrong one."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ConflictError, DTypeError, ShapeError

FLOATS = ("float16", "bfloat16", "float32")


def rows_of(name: str, value: Any, shape: tuple[int, ...] | None = None) -> jax.Array:
    """Return an array of rows, and check its shape against `shape` unless `shape` is None.

    Raises:
        DTypeError: it is no array, or of a type that kernels do not take.
        ShapeError: it has no rows, or another shape.
    """
    array = _array(name, value)
    if array.ndim == 0 or array.shape[-1] == 0:
        raise ShapeError(f"{name} has shape {array.shape}; it takes (..., N), with N of 1 or more")
    if shape is not None and array.shape != shape:
        raise ShapeError(f"{name} has shape {array.shape}; it takes {shape}, x's shape")
    return array


def vector_of(name: str, value: Any, n: int) -> jax.Array:
    """Return an array with one value per column.

    Raises:
        DTypeError: as from `rows_of`.
        ShapeError: it has another shape than (n,).
    """
    array = _array(name, value)
    if array.shape != (n,):
        raise ShapeError(f"{name} has shape {array.shape}; it takes ({n},), x's last dimension")
    return array


def number_of(name: str, value: Any, least: float = -math.inf) -> float:
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


def _array(name: str, value: Any) -> jax.Array:
    try:
        array = jnp.asarray(value)
    except TypeError as error:
        raise DTypeError(f"{name} is of {type(value).__name__}; it takes an array") from error
    if array.dtype.name not in FLOATS:
        raise DTypeError(f"{name} has dtype {array.dtype.name}; it takes {', '.join(FLOATS)}")
    return array
