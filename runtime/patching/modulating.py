"""Norms that a model's own forward modulates, computed together with the modulation.

A module that `patch` fused calls `modulate` where its forward scales and shifts the result of one of its norms. One
kernel normalises and modulates, if the norm is normforge's, no hook is on it, and `modulated_layer_norm` takes the
operands. Otherwise the norm is called first, and the forward's own modulation second. Rows are never normalised twice.

A function like DiT's `modulate(x, shift, scale)` is identified by calling it on random inputs of a few sizes. It is
tried again once a global or a closure cell that it reads changes: see `function_state`. A function that computes
something else only for other sizes, or only under other settings of torch, is not recognised as different.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product, starmap
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..families.functional import modulated_layer_norm, modulated_rms_norm
from .probing import Draw, called, recognised
from .rotating import FormulaOfOne, formulas_of_one
from .sums import is_bare, is_taken, is_within, options_of, rounds_once, vectors_of

# B differs from T, because (B, N) would otherwise pass for (T, N). The last size is close to a model's own.
_SIZES = ((2, 3, 8), (3, 1, 16), (1, 260, 72))


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

    def trials(self, function: Any, draw: Draw, *how: Any) -> Iterator[tuple[Any, Any]]:
        """Yield what the function returns for random operands, each with what this formula gives."""
        for samples, tokens, width in _SIZES:
            y, beside = draw(samples, tokens, width), draw(2, samples, 1, width)
            wanted = y * (1 + beside[self.scale]) + beside[1 - self.scale]
            operands = tuple(beside.squeeze(2) if self.by_sample else beside)
            yield called(function, y, operands, *how), wanted

    def fused(
        self, block: torch.nn.Module, norm: Any, x: Any, operands: tuple[torch.Tensor, ...]
    ) -> torch.Tensor | None:
        """Return the modulated rows; None where the kernel's result would differ from norm and modulation."""
        if not rounds_once(norm) or not is_taken(norm, x, *operands) or x.dim() != 3:
            return None
        shape, (weight, bias) = x.shape, vectors_of(norm)
        word, eps, weight_offset, y_dtype, _ = options_of(norm, x.dtype, x)
        a_sample = (shape[0], 1, shape[2])
        legal = ((shape[0], shape[2]),) if self.by_sample else (a_sample, shape, shape[2:])
        fitting = []
        for operand in operands:
            if operand.shape not in legal or not is_within(operand.dtype, y_dtype):
                return None
            fitting.append(operand.squeeze(1) if operand.shape == a_sample else operand)
        scale, shift = fitting[self.scale], fitting[1 - self.scale]
        if word == "layer":
            return modulated_layer_norm(x, scale, shift, weight=weight, bias=bias, eps=eps)
        return modulated_rms_norm(x, scale, shift, weight=weight, eps=eps, weight_offset=weight_offset)


def _formulas() -> Iterator[Formula | FormulaOfOne]:
    yield from starmap(Formula, product((0, 1), (True, False)))
    yield from formulas_of_one()


# Returns the modulation that a function computes, the rotation of one tensor, or None. Takes the function, the number
# of operands that the function takes by position behind the rows, the names of the others, and arguments that are no
# tensors, by name.
formula_of: Callable[..., Formula | FormulaOfOne | None] = partial(recognised, _formulas)

# Types of arguments that choose what a function does.
_CONSTANT = (bool, int, float, str, type(None))

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
    if not is_dynamo_compiling() and is_bare(norm):
        named: dict[str, Any] = {}
        constants: dict[str, Any] = {}
        for name, value in kwargs.items():
            (constants if value.__class__ in _CONSTANT else named)[name] = value
        how = len(args), tuple(named), tuple(constants.items())
        formula = WRITTEN_OUT if function is None else formula_of(function, *how)
        fused = None if formula is None else formula.fused(block, norm, x, (*args, *named.values()))
        if fused is not None:
            return fused
    y = norm(x)
    if function is not None:
        return function(y, *args, **kwargs)
    scale, shift = args
    return y * (1 + scale) + shift
