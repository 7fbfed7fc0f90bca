"""Philox-4x32-10 (Salmon et al., 2011) in NumPy, and the mask that is drawn by it: written apart from the product."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
LOW = np.uint64(0xFFFFFFFF)


def philox(counter: list[Words], key: tuple[int, int]) -> list[Words]:
    """Ten rounds over four words of 32 bits, each an array of uint64."""
    k0, k1 = key
    for _ in range(10):
        first, second = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (second >> np.uint64(32)) ^ counter[1] ^ np.uint64(k0),
            second & LOW,
            (first >> np.uint64(32)) ^ counter[3] ^ np.uint64(k1),
            first & LOW,
        ]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return counter


def bits(rows: npt.NDArray[np.int64], n: int, seed: int, offset: int) -> Words:
    """What is drawn for each element of rows of n, given their numbers, as (rows, n) words of 32 bits."""
    columns = np.arange(n, dtype=np.uint64)
    counter = rows.astype(np.uint64)[:, None] * np.uint64((n + 7) // 8) + columns // np.uint64(8)
    same = np.zeros_like(counter)
    seed, offset = seed % 2**64, offset % 2**64
    words = philox(
        [counter & LOW, counter >> np.uint64(32), same + np.uint64(offset % 2**32), same + np.uint64(offset >> 32)],
        (seed % 2**32, seed >> 32),
    )
    word = np.choose((columns % np.uint64(8) // np.uint64(2)).astype(int), words)
    swapped = ((word & np.uint64(0xFFFF)) << np.uint64(16)) | (word >> np.uint64(16))
    drawn: Words = np.where(columns % np.uint64(2) == 1, swapped, word)
    return drawn


def mask(rows: npt.NDArray[np.int64], n: int, p: float, seed: int, offset: int) -> npt.NDArray[np.bool_]:
    """Which elements are kept: those whose bits are no less than p of all there are."""
    kept: npt.NDArray[np.bool_] = bits(rows, n, seed, offset) >= np.uint64(np.floor(np.float64(np.float32(p)) * 2**32))
    return kept
