"""GroupNorm and norms over channels, held against the formula in fp64 closely, and calls that take a tile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from normforge.codegen.groups import GroupMode
from normforge.codegen.instance import Tile
from normforge.selection import dispatch, on_demand
from normforge.selection.table import RetiledTable
from proving.cases import LAYOUTS, Case, Tensors, arriving_at, cases, doubled, exact, formula, gradients, operands

# Of a value, and of the mean magnitude of its tensor: one rounding of y and dx, and sums of fp32.
TOLERANCES = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 3e-6}
SUM_TOLERANCE = 2e-5


def group(shape: tuple[int, ...], num_groups: int, *, channels_last: bool = False, **at: Any) -> Case:
    """Return the case of a call."""
    layout = "channels last" if channels_last else "contiguous"
    (case,) = cases("group", vary=(), shape=shape, num_groups=num_groups, layout=layout, **at)
    return case


def innermost(x: torch.Tensor) -> torch.Tensor:
    """Return the same values with channels innermost in memory."""
    return LAYOUTS["channels last"](x)


def hold(
    case: Case,
    given: Tensors | None = None,
    dy: torch.Tensor | None = None,
    *,
    device: str = "cpu",
    sum_tolerance: float = SUM_TOLERANCE,
) -> Tensors:
    """Fail unless y and the gradients of a call are those in fp64, and return y and the gradients by operand."""
    given = operands(case, device) if given is None else given
    (y,) = case.run(given)
    dy = arriving_at([y])[0] if dy is None else dy
    with torch.no_grad():
        (wanted,) = formula(case, doubled(given))
    found = gradients([y], given, [dy])
    close(y, wanted)
    for name, gradient in exact(case, given, [dy]).items():
        assert found[name].dtype is given[name].dtype
        close(found[name], gradient, SUM_TOLERANCE if name == "x" else sum_tolerance)
    return {"y": y, **found}


def close(found: torch.Tensor, wanted: torch.Tensor, sum_tolerance: float = 0.0) -> None:
    """Fail unless a tensor is as wanted but for one rounding, or for what sums of fp32 lose."""
    tolerance = max(TOLERANCES[found.dtype], sum_tolerance)
    # One element a group has a gradient of 0, but for roundings of fp64.
    scale = wanted.abs().mean().item() + 1e-6
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * scale)


@contextmanager
def tiled(mode: GroupMode, n: int, tile: Tile) -> Iterator[None]:
    """Have calls of a mode whose groups have n elements take a tile."""
    entry = on_demand.generate(mode, n, "a test")
    with dispatch.using(RetiledTable(dispatch.loaded(), entry, tile)):
        yield
