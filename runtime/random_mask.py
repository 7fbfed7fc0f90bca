"""Which elements a dropout keeps: the formula that kernels draw by, by torch's operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): what each round multiplies two of
# a counter's four words by, and what is added to a key's two.
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_WORD = 0xFFFFFFFF

# Neighbours that share one counter.
_SHARING = 8


def dropout_mask(
    shape: Sequence[int], dropout_p: float, dropout_rng: torch.Tensor, *, first_row: int = 0
) -> torch.Tensor:
    """Which elements a fused dropout keeps, the same to the bit: a function of seed, offset, row, column and N alone.

    Element (row, column) of (M, N) rows has counter c = row * ceil(N / 8) + column // 8, a 64-bit integer. Of the key
    (seed mod 2**32, seed // 2**32) and the counter (c mod 2**32, c // 2**32, offset mod 2**32, offset // 2**32)
    Philox-4x32-10 makes four words of 32 bits. The element has word (column % 8) // 2 of them, with its halves of 16
    bits swapped where column is odd, and is kept if that is at least floor(fp32(dropout_p) * 2**32).

    Args:
        shape: x's, (..., N); rows are counted over all dimensions but the last.
        dropout_p: 0 <= dropout_p < 1.
        dropout_rng: (2,) int64: seed and offset, each read as an unsigned 64-bit integer.
        first_row: the number of the first row, where these are rows of a larger tensor.

    Returns:
        The mask: shape, bool, on dropout_rng's device, True where an element is kept.
    """
    *leading, n = shape
    # Not numel() of a tensor of these: there need not be any.
    m = math.prod(leading)
    device = dropout_rng.device
    groups = -(-n // _SHARING)
    rows = first_row + torch.arange(m, device=device)
    counter = rows.unsqueeze(1) * groups + torch.arange(groups, device=device)
    bits = _bits(dropout_rng[0], dropout_rng[1], counter).view(m, groups * _SHARING)[:, :n]
    return (bits >= (_rounded(dropout_p, device) * 2.0**32).to(torch.int64)).view(*leading, n)


def dropped(tensor: torch.Tensor, dropout_p: float, dropout_rng: torch.Tensor) -> torch.Tensor:
    """Set dropped elements of a tensor to 0 and divide the kept elements by 1 - dropout_p."""
    keep = dropout_mask(tensor.shape, dropout_p, dropout_rng)
    return torch.where(keep, tensor * kept_factor(dropout_p, tensor.device), 0.0)


def kept_factor(dropout_p: float, device: torch.device) -> torch.Tensor:
    """Return the factor of elements that a dropout keeps, in fp32."""
    return 1.0 / (1.0 - _rounded(dropout_p, device))


def _rounded(dropout_p: float, device: torch.device) -> torch.Tensor:
    return torch.full((), dropout_p, dtype=torch.float32, device=device)


def _bits(seed: torch.Tensor, offset: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """32 bits, as int64, for each of the eight that share a counter."""
    a, b = counter & _WORD, (counter >> 32) & _WORD
    c, d = (offset & _WORD).expand_as(counter), ((offset >> 32) & _WORD).expand_as(counter)
    key, other_key = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        high, low = _product(a, _MULTIPLIERS[0])
        other_high, other_low = _product(c, _MULTIPLIERS[1])
        a, b, c, d = other_high ^ b ^ key, other_low, high ^ d ^ other_key, low
        key, other_key = (key + _WEYL[0]) & _WORD, (other_key + _WEYL[1]) & _WORD
    words = torch.stack((a, b, c, d), -1)
    swapped = ((words << 16) & _WORD) | (words >> 16)
    return torch.stack((words, swapped), -1)


def _product(word: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and lower 32 bits of an unsigned 64-bit product, which would overflow int64."""
    upper, lower = (word >> 16) * multiplier, (word & 0xFFFF) * multiplier
    return (upper + (lower >> 16)) >> 16, ((upper << 16) + lower) & _WORD
