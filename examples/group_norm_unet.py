"""Patch the GroupNorms of a small UNet, and compare the patched model with the original."""

from __future__ import annotations

import copy

import torch
from torch import nn

import normforge


class Block(nn.Module):
    """GroupNorm, SiLU and a convolution, twice, around a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with what the convolutions add."""
        y: torch.Tensor = self.conv1(self.act(self.norm1(x)))
        y = self.conv2(self.act(self.norm2(y)))
        return x + y


class UNet(nn.Module):
    """One level down and one up."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
        self.down, self.middle, self.up = (Block(channels) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an image of x's shape."""
        wide = self.down(self.enter(x))
        low = self.middle(nn.functional.avg_pool2d(wide, 2))
        image: torch.Tensor = self.leave(self.up(wide + nn.functional.interpolate(low, scale_factor=2)))
        return image


def main() -> float:
    """Return the largest difference between the outputs of the two models."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    original = UNet().to(device)
    patched = copy.deepcopy(original)
    print(normforge.patch(patched))
    x = torch.randn(1, 3, 16, 16, device=device)
    difference = float((original(x) - patched(x)).detach().abs().max())
    print(f"largest difference: {difference:.2g}")
    print(normforge.explain(patched, x))
    return difference


if __name__ == "__main__":
    main()
