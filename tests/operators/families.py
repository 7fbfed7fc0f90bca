"""Calls of the operators of modulated, gated and group norms, and the blocks that models have of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def by_name(name: str, given: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of an operator by their names in its schema."""
    return dict(zip([argument.name for argument in OPERATORS[name]._schema.arguments], given, strict=True))


def gated_block(norm: Any, projected: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A part of Mamba2's block, and of Gated DeltaNet's."""
    gate, x = projected.chunk(2, -1)
    y = norm(x, gate, weight, norm_before_gate=False, group_size=N // 2)
    x, gate = (part.view(*part.shape[:-1], 4, N // 4) for part in (x, gate))
    heads = norm(x, gate, activation="sigmoid")
    found: torch.Tensor = y + heads.flatten(-2)
    return found


def modulated_block(
    norm: Any, x: torch.Tensor, six: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """A part of DiT's block."""
    shift, scale, gate = six.chunk(6, -1)[:3]
    y, total = norm(x, scale, shift, gate=gate, residual=residual, weight=weight)
    again: torch.Tensor = norm(total, scale, shift)
    summed: torch.Tensor = torch.nn.functional.silu(y) + total + again
    return summed


def group_block(norm: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A part of a UNet's block."""
    y = norm(x, 4, weight, bias, activation="silu")
    again: torch.Tensor = x + norm(y * 2, 2, weight, None, 1e-3)
    return again


# By family: a block, the shapes of its tensors for some samples and rows, and the samples and rows that are traced one
# after another: another number of either is traced anew as a symbol.
BLOCKS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int, int], Any], Sequence[tuple[int, int]]]] = {
    "gated": (gated_block, lambda samples, rows: ((samples, rows, 2 * N), (N,)), [(2, 3), (2, 5), (2, 6)]),
    "modulated": (
        modulated_block,
        lambda samples, rows: ((samples, rows, N), (samples, 6 * N), (samples, rows, N), (N,)),
        [(2, 3), (3, 3), (3, 5)],
    ),
    "group": (group_block, lambda samples, rows: ((samples, 8, rows, 5), (8,), (8,)), [(2, 3), (3, 3)]),
}
