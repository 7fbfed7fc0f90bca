"""Several RMSNorms of JAX arrays in one launch: `rms_norms`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

import jax

from ..codegen.values import FusedAdd, Norm
from ..kernels.assembly import check_problems
from .calls import Prepared, normalising, quantising, results_of
from .functions import add_rms_norm, quantised_rms_norm

_PLAIN, _QUANTISED = signature(add_rms_norm), signature(quantised_rms_norm)
_QUANTISING = frozenset(_QUANTISED.parameters) - frozenset(_PLAIN.parameters)
_ARRAYS = ("x", "weight", "residual", "smooth_scale")
_NO_OPTIONS: Mapping[str, Any] = {}


def rms_norms(problems: Sequence[Sequence[Any]]) -> list[Any]:
    """Compute up to four RMSNorms, each with a row length, weight, residual and quantisation of its own, in one launch.

    Meant for few rows, where a launch takes longer than a norm: the latents of queries and of keys and values of MLA
    (DeepSeek-V2, 2024), for example. Each result is that of the function of one norm: `quantised_rms_norm` for an
    option that only this function has (smooth_scale, out_dtype or scale_dtype), else `add_rms_norm` for a residual,
    else `rms_norm`. So are gradients, each by kernels of its own.

    All norms share the warps of a program, those of the norm with most, so that other norms may differ in the last bits
    from calls by themselves. Under batch invariance they never do. A launch each serves rows that start anywhere, norms
    whose warps differ under batch invariance, and NORMFORGE_ON_MISS=error, because the kernel of a combination is
    generated on demand. vmap and sharded arrays are as in `rms_norm`.

    Args:
        problems: one to four tuples (x, weight, options), in which options, or both of the last, may be missing. x is
            (..., N) and weight (N,) or None. options are the other arguments of the function by name: eps,
            weight_offset, residual, smooth_scale, out_dtype and scale_dtype.

    Returns:
        The result of each function, in order: y, or (y, residual_out), or `Quantised`.

    Raises:
        ConflictError: there are no problems or more than four, or one is no such tuple.
        TypeError: an option is none that the function takes.
        GradientError: the function is differentiated in an operand of a quantised norm.
        NormforgeError: one of the errors that `rms_norm`, `add_rms_norm` or `quantised_rms_norm` lists.
    """
    check_problems(problems)
    return results_of(*[_prepared(*each) for each in problems])


def _prepared(x: jax.Array, weight: jax.Array | None = None, options: Mapping[str, Any] = _NO_OPTIONS) -> Prepared:
    """Return the operation of a problem, as its function makes it."""
    quantises = not _QUANTISING.isdisjoint(options)
    given = (_QUANTISED if quantises else _PLAIN).bind(**{"residual": None, **options}, x=x, weight=weight)
    given.apply_defaults()
    arrays = {name: given.arguments.pop(name) for name in _ARRAYS if name in given.arguments}
    fadd = FusedAdd.NONE if arrays["residual"] is None else FusedAdd.PRE_ADD_STORE
    prepare = quantising if quantises else partial(normalising, fadd)
    return prepare(Norm.RMS, arrays, *given.arguments.values())
