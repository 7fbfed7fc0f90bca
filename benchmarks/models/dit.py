"""The transformer blocks of DiT (Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023, section 3.2).

Each block's norms have no weights of their own: the conditioning gives a shift, a scale and a gate for either half
(adaLN-Zero), and `modulate` puts the first two behind the norm. Weights are random here, gates included: gates of zero,
which training starts from, would leave most gradients zero.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Scale and shift normalised tokens: x is (batch, tokens, width), the others are (batch, width)."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Block(nn.Module):
    """Attention and a perceptron, each behind a modulated norm and before a gate."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
        """One block on x (batch, tokens, width), by conditioning (batch, width)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(conditioning).chunk(6, dim=-1)
        x = x + gate1.unsqueeze(1) * self._attention(modulate(self.norm1(x), shift1, scale1))
        result: torch.Tensor = x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))
        return result

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        result: torch.Tensor = self.out(mixed.reshape(x.shape))
        return result


class DiT(nn.Module):
    """Blocks, and the final modulated norm with its projection; patches are embedded elsewhere."""

    def __init__(self, layers: int, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
        """Predict noise of x's shape, (batch, tokens, width)."""
        for block in self.blocks:
            x = block(x, conditioning)
        shift, scale = self.modulation(conditioning).chunk(2, dim=-1)
        result: torch.Tensor = self.out(modulate(self.norm(x), shift, scale))
        return result
