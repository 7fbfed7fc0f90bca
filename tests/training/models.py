"""Models to patch: a tiny transformer, and norms built like those of Hugging Face's models."""

from __future__ import annotations

import torch
from torch.nn import functional

WIDTH = 32


class Block(torch.nn.Module):
    """A residual block with two norms of either kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.second = torch.nn.RMSNorm(WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        h = self.narrow(functional.gelu(self.wide(self.second(x))))
        return torch.add(x, h)


class Transformer(torch.nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(17, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.last = torch.nn.LayerNorm(WIDTH, bias=False)
        self.head = torch.nn.Linear(WIDTH, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.last(x))
        return logits


class _Weighted(torch.nn.Module):
    """What Hugging Face's RMSNorms have in common: a weight of one dimension, and an epsilon."""

    def __init__(self, n: int = WIDTH, eps: float = 1e-6, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(n, dtype=dtype))
        self.variance_epsilon = eps

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        h: torch.Tensor = wide / (wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
        return h


class LlamaRMSNorm(_Weighted):
    """Rounds to the input's type, then multiplies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.factor(x).to(x.dtype)


class T5LayerNorm(_Weighted):
    """Rounds to the weight's type, then multiplies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.factor(x)
        return self.weight * (h if self.weight.dtype == torch.float32 else h.to(self.weight.dtype))


class Olmo2RMSNorm(_Weighted):
    """Multiplies, then rounds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.factor(x)).to(x.dtype)


class TwiceRoundedRMSNorm(_Weighted):
    """Rounds, multiplies and rounds: no more than a bit off either order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.factor(x).to(x.dtype)).to(x.dtype)


class Qwen2RMSNorm(LlamaRMSNorm):
    """Calls its epsilon `eps`."""

    def __init__(self, n: int = WIDTH, eps: float = 1e-6) -> None:
        super().__init__(n, eps)
        self.eps = eps


class GemmaRMSNorm(_Weighted):
    """Multiplies by 1 + weight: of the same build as Llama's, and another formula."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.factor(x) * (1 + self.weight.float())).to(x.dtype)


class MisplacedEpsilonRMSNorm(_Weighted):
    """Adds its epsilon outside the root, which shows only where x is small."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        h = wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
        return self.weight * h.to(x.dtype)


class GatedRMSNorm(_Weighted):
    """Takes a second tensor."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.weight * self.factor(x * gate).to(x.dtype)


class BiasedRMSNorm(LlamaRMSNorm):
    """Has a parameter that patch would drop."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(WIDTH))


class NamelessEpsilonRMSNorm(torch.nn.Module):
    """Keeps its epsilon under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))
        self.epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.epsilon).rsqrt()


class ScaledLayerNorm(torch.nn.LayerNorm):
    """A subclass of torch's that computes something of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class OwnLayerNorm(torch.nn.Module):
    """A norm of somebody's own, as minimal GPTs have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))
        self.bias = torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (WIDTH,), self.weight, self.bias)
