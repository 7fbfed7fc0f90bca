"""Norms that a model's own forward modulates, computed together with the modulation.

A module that `patch` fused calls `modulate` where its forward scales and shifts the result of one of its norms. One
kernel normalises and modulates, if the norm is normforge's, no hook is on it, and `modulated_layer_norm` takes the
operands. Otherwise the norm is called first, and the forward's own modulation second. Rows are never normalised twice.

A function like DiT's `modulate(x, shift, scale)` is identified by calling it on random inputs of a few sizes. It is
tried again once a global or a closure cell that it reads changes: see `function_state`. A function that computes
something else only for other sizes, or only under other settings of torch, is not recognised as different.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..families.functional import modulated_layer_norm, modulated_rms_norm
from .function_state import Reads
from .probing import apart, attempt
from .sums import is_bare, is_taken, is_within, options_of, rounds_once, vectors_of


@dataclass(frozen=True)
class Formula:
    """A function of normalised rows y and two operands: y * (1 + scale) + shift.

    Attributes:
        scale: which of the two the scale is.
        by_sample: whether they are (B, N), and the function puts them beside the rows of (B, T, N); otherwise they
            broadcast as they are.
    """

    scale: int
    by_sample: bool


_FORMULAS = [Formula(scale, by_sample) for scale, by_sample in product((0, 1), (True, False))]
_TYPES = ((torch.float64, 1e-12), (torch.bfloat16, 2e-2))

# An expression that is written out in a forward broadcasts by itself.
WRITTEN_OUT = Formula(scale=0, by_sample=False)


def modulate(block: torch.nn.Module, function: Any, norm: Any, x: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Compute function(norm(x), *args, **kwargs) in the forward of a fused module.

    Args:
        block: the module.
        function: the function that modulates; None for `norm(x) * (1 + scale) + shift`.
        norm: its norm.
        x: the norm's input.
        args: the function's other positional arguments; scale and shift if function is None.
        kwargs: the function's keyword arguments.
    """
    if not is_dynamo_compiling() and is_bare(norm) and rounds_once(norm):
        formula = WRITTEN_OUT if function is None else formula_of(function, len(args), tuple(kwargs))
        fused = None if formula is None else _fused(formula, norm, x, (*args, *kwargs.values()))
        if fused is not None:
            return fused
    y = norm(x)
    if function is not None:
        return function(y, *args, **kwargs)
    scale, shift = args
    return y * (1 + scale) + shift


def formula_of(function: Any, positional: int, named: tuple[str, ...]) -> Formula | None:
    """Return the modulation that a function computes, or None if the function computes anything else.

    Args:
        function: anything.
        positional: how many of the two operands it takes by position, behind the rows.
        named: the names of the others.
    """
    if function.__class__ is not FunctionType:
        return None
    reads, formula = _tried(function, positional, named)
    # A function that reads what may change unseen is never fused.
    if not (reads.names or reads.still()):
        _tried.cache_clear()
        _, formula = _tried(function, positional, named)
    return formula


# A lambda in a forward is another function in each call.
@lru_cache(maxsize=256)
def _tried(function: FunctionType, positional: int, named: tuple[str, ...]) -> tuple[Reads, Formula | None]:
    """Try a function, and return what it reads and the modulation that it computes."""
    reads = Reads()
    reads.follow(function)

    def called(y: torch.Tensor, *operands: torch.Tensor) -> Any:
        return function(y, *operands[:positional], **dict(zip(named, operands[positional:], strict=True)))

    with apart():
        formula = next((each for each in _FORMULAS if attempt(partial(_computes, called, each, reads), False)), None)
    return reads, None if reads.names else formula


# B differs from T, because (B, N) would otherwise pass for (T, N). The last size is close to a model's own.
_SIZES = ((2, 3, 8), (3, 1, 16), (1, 260, 72))


def _computes(called: Callable[..., Any], formula: Formula, reads: Reads) -> bool:
    """Return True if a function computes a formula, and have its reads watched; raise what the function raises."""
    generator = torch.Generator("cpu").manual_seed(0)
    for (samples, tokens, width), (dtype, tolerance) in product(_SIZES, _TYPES):
        y = torch.randn(samples, tokens, width, generator=generator, dtype=torch.float64).to(dtype)
        beside = torch.randn(2, samples, 1, width, generator=generator, dtype=torch.float64).to(dtype)
        wanted = y * (1 + beside[formula.scale]) + beside[1 - formula.scale]
        operands = (beside.squeeze(2) if formula.by_sample else beside).clone()
        called(y.clone(), *operands)
        with reads:
            actual = called(y, *operands)
        torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)
    return True


def _fused(formula: Formula, norm: Any, x: Any, operands: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """Return the modulated rows, or None where the kernel's result would differ from norm and modulation."""
    if not is_taken(norm, x, *operands) or x.dim() != 3:
        return None
    shape, (weight, bias) = x.shape, vectors_of(norm)
    word, eps, weight_offset, y_dtype, _ = options_of(norm, x.dtype, x)
    a_sample = (shape[0], 1, shape[2])
    legal = ((shape[0], shape[2]),) if formula.by_sample else (a_sample, shape, shape[2:])
    fitting = []
    for operand in operands:
        if operand.shape not in legal or not is_within(operand.dtype, y_dtype):
            return None
        fitting.append(operand.squeeze(1) if operand.shape == a_sample else operand)
    scale, shift = fitting[formula.scale], fitting[1 - formula.scale]
    if word == "layer":
        return modulated_layer_norm(x, scale, shift, weight=weight, bias=bias, eps=eps)
    return modulated_rms_norm(x, scale, shift, weight=weight, eps=eps, weight_offset=weight_offset)
