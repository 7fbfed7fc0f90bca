"""Pre-norm stacks of matrix products and norms, as Llama's."""

from __future__ import annotations

import torch

import normforge

WIDTH = 32


class Block(torch.nn.Module):
    """A residual stream, and two branches that normalise it and add to it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(normforge.RMSNorm(width) for _ in range(2))
        self.branches = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = x + branch(norm(x))
        return x


class Stack(torch.nn.Sequential):
    """Two such blocks, and a norm at the end: four additions, each with a norm behind it."""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), normforge.LayerNorm(WIDTH))


class PostNorm(Block):
    """A block that normalises what its branch returns too, as Gemma 2's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, behind = self.norms
        for branch in self.branches:
            x = x + behind(branch(before(x)))
        return x


def gradients(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a loss that no norm leaves constant, by x and the parameters."""
    weight = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    return list(torch.autograd.grad((y * weight).float().sum(), [x, *model.parameters()]))
