"""GroupNorm in fp64 by torch's own operators, what its results are held to, and calls that take a tile of a test's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

import normforge
from normforge.codegen.groups import GroupMode
from normforge.codegen.instance import Tile
from normforge.selection import dispatch, on_demand
from normforge.selection.table import RetiledTable

# Of a value, and of the mean magnitude of its tensor: one rounding of y and dx, and sums of fp32.
TOLERANCES = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 3e-6}
SUM_TOLERANCE = 2e-5

NAMES = ("y", "dx", "dweight", "dbias")


@dataclass(frozen=True)
class Problem:
    """One call.

    Attributes:
        shape: x's.
        groups: of a sample.
        dtype: x's.
        channels_last: how x lies.
        activation: what follows.
        affine: whether there are weight and bias.
        device: where.
    """

    shape: tuple[int, ...]
    groups: int
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    activation: str | None = None
    affine: bool = True
    device: str = "cpu"

    def x(self) -> torch.Tensor:
        """Values around 3, so that a mean that is forgotten shows."""
        x = (torch.randn(self.shape, device=self.device) * 2 + 3).to(self.dtype)
        return innermost(x) if self.channels_last else x

    def vectors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Weight and bias, fp32 whatever x is."""
        if not self.affine:
            return None, None
        weight, bias = torch.randn(2, self.shape[1], device=self.device)
        return weight + 1, bias


def innermost(x: torch.Tensor) -> torch.Tensor:
    """The same with channels innermost in memory."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def expected(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
    activation: str | None = None,
) -> torch.Tensor:
    """What a call returns, in the type of x: fp64."""
    y = functional.group_norm(x, groups, weight, bias, eps)
    return functional.silu(y) if activation == "silu" else y


def double(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A leaf in fp64."""
    return None if tensor is None else tensor.detach().double().requires_grad_()


def results(problem: Problem) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Forward and backward: what normforge computes, and what is expected in fp64."""
    x, (weight, bias) = problem.x(), problem.vectors()
    dy = torch.randn(problem.shape, device=problem.device).to(problem.dtype)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    y = normforge.group_norm(x, problem.groups, weight, bias, activation=problem.activation)
    found = (y, *torch.autograd.grad(y, leaves, dy))
    exact = [double(tensor) for tensor in (x, weight, bias)]
    assert exact[0] is not None
    wanted = expected(exact[0], problem.groups, exact[1], exact[2], activation=problem.activation)
    there: list[Any] = [tensor for tensor in exact if tensor is not None]
    gradients = torch.autograd.grad(wanted, there, dy.double())
    names = NAMES[: 1 + len(leaves)]
    return dict(zip(names, found, strict=True)), dict(zip(names, (wanted, *gradients), strict=True))


def require(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Hold results against those in fp64."""
    for name, want in wanted.items():
        tolerance = max(TOLERANCES[dtype] if name in ("y", "dx") else 0.0, SUM_TOLERANCE if name != "y" else 0.0)
        # One element a group has a gradient of 0, but for roundings of fp64.
        scale = want.abs().mean().item() + 1e-6
        torch.testing.assert_close(found[name].double(), want, rtol=tolerance, atol=tolerance * scale)


@contextmanager
def tiled(mode: GroupMode, n: int, tile: Tile) -> Iterator[None]:
    """Have calls of a mode whose groups have n elements take a tile."""
    entry = on_demand.generate(mode, n, "a test")
    with dispatch.using(RetiledTable(dispatch.loaded(), entry, tile)):
        yield
