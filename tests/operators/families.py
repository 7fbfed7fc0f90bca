"""Calls of the operators of modulated, gated and group norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge

N = 32

FUNCTIONS: dict[str, Any] = {
    f"{family}_{norm}": getattr(normforge, f"{family}_{norm}_norm")
    for family in ("gated", "modulated")
    for norm in ("layer", "rms")
} | {"group": normforge.group_norm}
OPERATORS: dict[str, Any] = {name: getattr(torch.ops.normforge, f"{name}_norm").default for name in FUNCTIONS}
BACKWARD: dict[str, Any] = {name: getattr(torch.ops.normforge, f"{name}_norm_backward").default for name in FUNCTIONS}

each_family = pytest.mark.parametrize("name", FUNCTIONS)
# GroupNorm quantises nothing, and its row is a group.
each_norm = pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "group"])

# What a call is told besides tensors, where a test does not say otherwise.
_TOLD: dict[str, Any] = {
    "eps": 1e-5,
    "weight_offset": 0.5,
    "gating": "after_norm",
    "activation": "silu",
    "num_groups": 4,
    "fquant": "none",
    "out_dtype": None,
    "save_mv": True,
}


def arguments(name: str, *, full: bool, grad: bool = False, rows: int = 3, **told: Any) -> tuple[Any, ...]:
    """A call of an operator, in the order of its schema.

    Args:
        name: of `OPERATORS`.
        full: of groups of columns, with x's gate and a residual, or with channels innermost; or else without.
        grad: whether gradients are due.
        rows: how many rows a sample has.
        told: what is told otherwise than usual.
    """
    shape = 2, rows, N
    shapes: dict[str, tuple[int, ...] | None]
    if name.startswith("gated"):
        vector = (2, N) if full else (N,)
        shapes = {"x": (rows, 2, N), "gate": (rows, 2, N), "weight": vector, "bias": vector}
    elif name == "group":
        shapes = {"x": (2, 8, rows, 5), "weight": (8,), "bias": (8,)}
    else:
        sample = (2, N)
        shapes = {"x": shape, "scale": sample, "shift": sample, "weight": (N,), "bias": None}
        shapes |= {"gate": sample, "residual": shape} if full else {"gate": None, "residual": None}
    tensors = {each: None if shape is None else torch.randn(shape) for each, shape in shapes.items()}
    if name == "group" and full:
        tensors["x"] = torch.randn(2, 8, rows, 5).to(memory_format=torch.channels_last)
    for tensor in tensors.values():
        if tensor is not None:
            tensor.requires_grad_(grad)
    given = tensors | _TOLD | told
    return tuple(given[argument.name] for argument in OPERATORS[name]._schema.arguments)
