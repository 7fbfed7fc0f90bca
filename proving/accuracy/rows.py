"""The kinds of rows that accuracy is measured on, by name: what real activations and hard cases look like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Source:
    """The source of a kind's numbers: a generator, and the dtype that the rows will have."""

    generator: torch.Generator
    dtype: torch.dtype

    def normal(self, m: int, n: int) -> torch.Tensor:
        """(m, n) of N(0, 1), in fp64."""
        return torch.randn(m, n, generator=self.generator, dtype=torch.float64, device=self.generator.device)

    def uniform(self, m: int, n: int) -> torch.Tensor:
        """(m, n) within 0..1, in fp64."""
        return torch.rand(m, n, generator=self.generator, dtype=torch.float64, device=self.generator.device)

    def step(self, value: float) -> float:
        """From a value to its neighbour in the dtype."""
        info = torch.finfo(self.dtype)
        return float(2.0 ** torch.tensor(value).log2().floor()) * info.eps


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# fp16 ends at 65504: neither these values nor squares that fp32 cannot hold are there.
_WIDE = (torch.bfloat16, torch.float32)
# The first values of a row, as many as one thread loads at once.
_HEAD = 8


@dataclass(frozen=True)
class Kind:
    """One kind of rows.

    Attributes:
        means: what they are, for a reader.
        draw: from a source, a number of rows and N to fp64 rows, which are then rounded to the dtype.
        dtypes: those that can hold them.
    """

    means: str
    draw: Callable[[Source, int, int], torch.Tensor]
    dtypes: tuple[torch.dtype, ...] = _FLOATS

    def rows(self, m: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """(m, n) rows in a dtype, on the generator's device."""
        return self.draw(Source(generator, dtype), m, n).to(dtype)


def _outlier(source: Source, m: int, n: int, value: float = 3000) -> torch.Tensor:
    rows = source.normal(m, n)
    at = (source.uniform(m, 1) * n).long()
    return rows.scatter_(1, at, value)


def _starts_with(rows: torch.Tensor, count: int, value: float | torch.Tensor) -> torch.Tensor:
    rows[:, :count] = value
    return rows


def _heavy_head(source: Source, m: int, n: int) -> torch.Tensor:
    count = min(_HEAD, n)
    return _starts_with(source.normal(m, n), count, 3e17 + 3.7e18 * source.uniform(m, count))


def _far(source: Source, m: int, n: int) -> torch.Tensor:
    if source.dtype == torch.float32:
        return 1e4 + 1e-2 * source.normal(m, n)
    return 777 + 2 * source.step(777) * source.normal(m, n)


def _denormal(source: Source, m: int, n: int) -> torch.Tensor:
    magnitude = torch.finfo(source.dtype).smallest_normal * 2 ** (9 * source.uniform(m, n) - 6)
    return magnitude * source.normal(m, n).sign()


def _cancelling(source: Source, m: int, n: int) -> torch.Tensor:
    rows = source.normal(m, n)
    pairs = 1e4 * (1 + 0.1 * rows[:, : n // 2])
    rows[:, : n // 2 * 2] = torch.stack((pairs, -pairs), -1).flatten(1)
    return rows


KINDS: dict[str, Kind] = {
    "random": Kind("N(0, 1)", Source.normal),
    "first outlier": Kind(
        "N(0, 1), the first value 3000, as a massive activation is",
        lambda s, m, n: _starts_with(s.normal(m, n), 1, 3000),
    ),
    "outlier": Kind("N(0, 1), one value anywhere 3000", _outlier),
    "outlier 1e4": Kind("N(0, 1), one value anywhere 1e4", lambda s, m, n: _outlier(s, m, n, 1e4)),
    "head 777": Kind(
        "the first eight values 777, the others 1e-3 · N(0, 1)",
        lambda s, m, n: _starts_with(1e-3 * s.normal(m, n), _HEAD, 777),
    ),
    "start 777": Kind(
        "the first N / 64 values 777, the others 1e-3 · N(0, 1)",
        lambda s, m, n: _starts_with(1e-3 * s.normal(m, n), max(1, n // 64), 777),
    ),
    "far mean": Kind("1e4 + 1e-2 · N(0, 1) in fp32, 777 + two steps · N(0, 1) in 16 bits", _far),
    "near constant": Kind("777 or its neighbour", lambda s, m, n: 777 + s.step(777) * (s.uniform(m, n) < 0.5)),
    "denormal": Kind("from 1/64 of the smallest normal number to 8 times it, of either sign", _denormal),
    "cancelling": Kind("neighbours v and -v of about 1e4", _cancelling),
    "heavy head": Kind("N(0, 1), the first eight values from 3e17 to 4e18", _heavy_head, _WIDE),
    "huge": Kind("1e25 · N(0, 1), whose squares fp32 cannot hold", lambda s, m, n: 1e25 * s.normal(m, n), _WIDE),
}
