"""A case's tensors as rows, some of them at a time, and what the oracle makes of those."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import oracle
from .case import Case, Norm

# The oracle holds some ten fp64 copies of what it is given.
_AT_ONCE = 1 << 23

Tensors = dict[str, torch.Tensor]


def rows_of(tensor: torch.Tensor, n: int) -> torch.Tensor:
    """Return a tensor of x's shape as (M, N)."""
    return tensor.flatten(0, -2) if tensor.dim() > 2 else tensor.view(-1, n) if tensor.dim() == 1 else tensor


def blocks(case: Case) -> Iterator[slice]:
    """Every row of a case, some at a time."""
    step = max(1, _AT_ONCE // case.n)
    for start in range(0, case.rows, step):
        yield slice(start, start + step)


def exact(case: Case, given: Tensors, rows: Tensors, part: slice) -> oracle.Forward:
    """Return the oracle's outputs of some rows; `rows` holds x and residual as (M, N)."""
    columns = {name: given[name] for name in ("weight", "bias", "x_bias", "smooth_scale") if name in given}
    return oracle.forward(
        rows["x"][part],
        centres=case.norm is Norm.LAYER,
        eps=case.eps,
        weight_offset=case.weight_offset,
        residual=rows["residual"][part] if "residual" in rows else None,
        stores=case.fadd == "pre_add_store",
        quantised=case.y if case.quantises else None,
        scale_dtype=case.scale,
        rounds_first=case.rounds_first,
        **columns,
    )


def flat(case: Case, given: Tensors) -> Tensors:
    """Return the tensors that have rows, each as (M, N)."""
    names = ("x", "residual", "dy", "dresidual_out")
    return {name: rows_of(given[name], case.n) for name in names if name in given}
