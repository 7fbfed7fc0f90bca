"""Calls of operators of modulated and gated norms, whose tests are alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

import normforge

N = 32

FUNCTIONS: dict[str, Any] = {
    f"{family}_{norm}": getattr(normforge, f"{family}_{norm}_norm")
    for family in ("gated", "modulated")
    for norm in ("layer", "rms")
}
OPERATORS: dict[str, Any] = {name: getattr(torch.ops.normforge, f"{name}_norm").default for name in FUNCTIONS}
BACKWARD: dict[str, Any] = {name: getattr(torch.ops.normforge, f"{name}_norm_backward").default for name in FUNCTIONS}

each_norm = pytest.mark.parametrize("name", FUNCTIONS)

# What a call is told besides tensors, where a test does not say otherwise.
_TOLD: dict[str, Any] = {
    "eps": 1e-5,
    "weight_offset": 0.5,
    "gating": "after_norm",
    "activation": "silu",
    "fquant": "none",
    "out_dtype": None,
    "save_mv": True,
}


def arguments(name: str, *, full: bool, grad: bool = False, rows: int = 3, **told: Any) -> tuple[Any, ...]:
    """A call of an operator, in the order of its schema.

    Args:
        name: of `OPERATORS`.
        full: of groups of columns, or with x's gate and a residual; or else without.
        grad: whether gradients are due.
        rows: how many rows a sample has.
        told: what is told otherwise than usual.
    """
    shape = 2, rows, N
    shapes: dict[str, tuple[int, ...] | None]
    if name.startswith("gated"):
        vector = (2, N) if full else (N,)
        shapes = {"x": (rows, 2, N), "gate": (rows, 2, N), "weight": vector, "bias": vector}
    else:
        sample = (2, N)
        shapes = {"x": shape, "scale": sample, "shift": sample, "weight": (N,), "bias": None}
        shapes |= {"gate": sample, "residual": shape} if full else {"gate": None, "residual": None}
    tensors = {
        each: None if shape is None else torch.randn(shape).requires_grad_(grad) for each, shape in shapes.items()
    }
    given = tensors | _TOLD | told
    return tuple(given[argument.name] for argument in OPERATORS[name]._schema.arguments)


def compiles(block: Callable[..., torch.Tensor], backend: str, calls: Iterable[Sequence[torch.Tensor]]) -> None:
    """Fail unless a compiled block has the results and gradients of the eager block, call after call."""
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for given in calls:
        y, its = compiled(*given), block(*given)
        torch.testing.assert_close(y, its, rtol=1e-5, atol=1e-5)
        dy = torch.randn_like(y)
        gradients = torch.autograd.grad(y, given, dy)
        torch.testing.assert_close(gradients, torch.autograd.grad(its, given, dy), rtol=1e-4, atol=1e-4)
