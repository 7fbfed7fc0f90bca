"""Define the sizes that a soak draws from, on a GPU and in the interpreter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """The sizes that a soak draws from; each kind of call is compiled for few rows and for many."""

    lengths: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    calls: int
    steps: int
    backward: int
    threads: int
    most: int


SIZES = {
    "cuda": Size(
        lengths=(64, 100, 257, 768, 1024, 1536, 2048, 4096, 4099, 5120, 8192, 16384, 40000),
        shapes=((300,), (1,), (), (2, 150), (4, 1, 3), (0,)),
        calls=40,
        steps=10,
        backward=6,
        threads=4,
        most=1 << 22,
    ),
    "cpu": Size(lengths=(24, 130), shapes=((2,), (1, 3), ()), calls=6, steps=2, backward=2, threads=3, most=1 << 12),
}
