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


class LlamaRMSNorm(torch.nn.Module):
    """A norm that is written out; rounded to the input's type, then multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH))
        self.variance_epsilon = 1e-6

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.factor(x.float()).to(x.dtype)


class Olmo2RMSNorm(LlamaRMSNorm):
    """Multiplied, then rounded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.factor(x.float())).to(x.dtype)


class GemmaRMSNorm(LlamaRMSNorm):
    """Multiplied by 1 + weight, then rounded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.factor(x.float()) * (1.0 + self.weight.float())).to(x.dtype)


class T5LayerNorm(LlamaRMSNorm):
    """Rounded to the weight's type, then multiplied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.factor(x.float())
        return self.weight * (h.to(self.weight.dtype) if self.weight.dtype in (torch.float16, torch.bfloat16) else h)
