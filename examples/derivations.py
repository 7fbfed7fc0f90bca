"""Computes the numbers of docs/explanation/derivations.md; `derivation_pictures.py` beside it draws them.

    python examples/derivations.py                              # print the tables
    python examples/derivations.py --into docs/explanation/derivations.md

Everything is computed in numpy, on a CPU, additions in an order that is written down here: two machines give the same
numbers. Nothing is timed; programs that wait for locks are a model, whose times are made up.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

# An array of numpy's; its own types say no more of what is computed here.
Array: TypeAlias = Any


COLUMNS = 4096
RATIOS = tuple(10**exponent for exponent in range(8))
_ROWS = 16


def row_sum(values: Array) -> Array:
    """Return the sum of each row, whose length is a power of two, by halves, as hardware adds up a row."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values


def by_squares(x: Array) -> Array:
    """Normalise by the mean of the squares less the square of the mean."""
    n = np.float32(x.shape[1])
    mean = row_sum(x) / n
    return (x - mean) / np.sqrt(row_sum(x * x) / n - mean * mean)


def by_mean(x: Array) -> Array:
    """Normalise by the squared deviations from the mean."""
    n = np.float32(x.shape[1])
    centred = x - row_sum(x) / n
    return centred / np.sqrt(row_sum(centred * centred) / n)


def by_welford(x: Array) -> Array:
    """Normalise by Welford's running mean and sum of squares, value by value."""
    mean, squares = (np.zeros((len(x), 1), np.float32) for _ in range(2))
    for count in range(x.shape[1]):
        value = x[:, count : count + 1]
        before = value - mean
        mean = mean + before / np.float32(count + 1)
        squares = squares + before * (value - mean)
    return (x - mean) / np.sqrt(squares / np.float32(x.shape[1]))


def by_pivot(x: Array) -> Array:
    """Normalise by deviations from a rounded mean, the pivot, corrected by the mean of the deviations."""
    n = np.float32(x.shape[1])
    centred = x - row_sum(x) / n
    shift = row_sum(centred) / n
    return (centred - shift) / np.sqrt(row_sum(centred * centred) / n - shift * shift)


WAYS: dict[str, Callable[[Array], Array]] = {
    "mean(x²) - mean(x)²": by_squares,
    "Welford": by_welford,
    "around the mean": by_mean,
    "around a pivot": by_pivot,
}


def errors(way: Callable[[Array], Array], columns: int = COLUMNS) -> list[float]:
    """Return the largest error against fp64 for each ratio of the mean to the standard deviation."""
    found = []
    for ratio in RATIOS:
        x = (ratio + np.random.default_rng(0).standard_normal((_ROWS, columns))).astype(np.float32)
        exact = x.astype(np.float64)
        exact -= exact.mean(1, keepdims=True)
        exact /= np.sqrt((exact * exact).mean(1, keepdims=True))
        with np.errstate(invalid="ignore", divide="ignore"):
            off = np.abs(way(x) - exact).max()
        found.append(float(off) if np.isfinite(off) else math.nan)
    return found


def variances_table() -> str:
    """Return errors by way and ratio, as Markdown."""
    lines = [("mean / deviation", *map(_short, RATIOS))]
    for name, way in WAYS.items():
        lines.append((name, *map(_short, errors(way))))
    return table(lines)


def _short(number: float) -> str:
    return "NaN" if math.isnan(number) else f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e")


M, N, MULTIPROCESSORS = 32768, 4096, 132
BUFFERS, PROGRAMS = 128, 2 * MULTIPROCESSORS
ORDERS, ORDER_ROWS, ORDER_COLUMNS = 20, 4096, 512


def traffic() -> dict[str, int]:
    """Bytes of a backward pass of M rows of N bf16 columns, by what moves them."""
    return {
        "x and dy read, dx written": 3 * M * N * 2,
        f"locks: each row reads and writes one of {BUFFERS} sums": M * 2 * N * 2 * 4,
        f"locks: {BUFFERS} sums are cleared, and read at the end": BUFFERS * 2 * N * 2 * 4,
        f"partial sums: {PROGRAMS} programs write theirs, which are read at the end": PROGRAMS * 2 * N * 2 * 4,
    }


def in_turn(terms: Array, buffers: int, order: Array) -> Array:
    """Columns' sums of rows that are added, in an order, to the buffer of each, and of the buffers."""
    sums = np.zeros((buffers, terms.shape[1]), np.float32)
    for row in order:
        sums[row % buffers] += terms[row]
    total = sums[0]
    for each in sums[1:]:
        total = total + each
    return total


def orders() -> tuple[Array, Array]:
    """Columns' sums in as many orders as chance has it, and in one; fp64 is taken off all of them."""
    generator = np.random.default_rng(0)
    terms = (generator.standard_normal((2, ORDER_ROWS, ORDER_COLUMNS)).prod(0)).astype(np.float32)
    exact = terms.astype(np.float64).sum(0)
    chance = [in_turn(terms, 32, generator.permutation(ORDER_ROWS)) for _ in range(ORDERS)]
    fixed = [in_turn(terms, 32, np.arange(ORDER_ROWS)) for _ in range(2)]
    return np.array(chance) - exact, np.array(fixed) - exact


def sums_table() -> str:
    """Bytes, and how many sums come out otherwise, as Markdown."""
    bytes_table = table(
        [("backward 32768×4096, bf16", "MB"), *((name, f"{b / 1e6:.0f}") for name, b in traffic().items())]
    )
    chance, fixed = orders()
    differ = int((chance != chance[0]).any(0).sum())
    same = int((fixed[0] == fixed[1]).all())
    assert same
    return (
        f"{bytes_table}\n\nOf {ORDER_COLUMNS} sums of {ORDER_ROWS} rows, {differ} had other bits in one of {ORDERS} "
        "orders than in the first; in a fixed order none had."
    )


class Span(NamedTuple):
    """A stretch of a program's time, spent on one of "row", "wait", "add" and "store"."""

    program: int
    start: float
    length: float
    what: str


SLOTS, LOCKS, TOTAL_ROWS = 12, 3, 60
_ROW_TIME, ADD_TIME = 3.0, 1.1


def with_locks() -> list[Span]:
    """Programs of one row each: as one ends another begins in its place; who asked for a lock first has it first."""
    generator = np.random.default_rng(2)
    free = [(0.0, slot) for slot in range(SLOTS)]
    held = [0.0] * LOCKS
    asking: list[tuple[float, int, int]] = []
    spans: list[Span] = []
    row = 0
    while row < TOTAL_ROWS or asking:
        if row < TOTAL_ROWS and free and (not asking or free[0] <= asking[0][:2]):
            begin, slot = heapq.heappop(free)
            length = _ROW_TIME * generator.uniform(0.85, 1.15)
            spans.append(Span(slot, begin, length, "row"))
            heapq.heappush(asking, (begin + length, slot, row % LOCKS))
            row += 1
        else:
            asked, slot, lock = heapq.heappop(asking)
            start = max(asked, held[lock])
            spans += [Span(slot, asked, start - asked, "wait"), Span(slot, start, ADD_TIME, "add")]
            held[lock] = start + ADD_TIME
            heapq.heappush(free, (held[lock], slot))
    return spans


def with_partial_sums() -> list[Span]:
    """Return the spans of as many programs as fit, where each takes several rows and stores its sums once."""
    generator = np.random.default_rng(2)
    spans = []
    for slot in range(SLOTS):
        now = 0.0
        for _ in range(slot, TOTAL_ROWS, SLOTS):
            length = _ROW_TIME * generator.uniform(0.85, 1.15)
            spans.append(Span(slot, now, length, "row"))
            now += length
        spans.append(Span(slot, now, ADD_TIME, "store"))
    return spans


TABLES: dict[str, Callable[[], str]] = {"variances": variances_table, "sums": sums_table}


def table(lines: Sequence[Sequence[str]]) -> str:
    """Format lines as a Markdown table, the first line as its head."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = [
        "| "
        + " | ".join(_aligned(text, width, at) for at, (text, width) in enumerate(zip(line, widths, strict=True)))
        + " |"
        for line in lines
    ]
    rule = (
        "|"
        + "|".join("-" * (width + 2) if at == 0 else "-" * (width + 1) + ":" for at, width in enumerate(widths))
        + "|"
    )
    return "\n".join([rows[0], rule, *rows[1:]])


def _aligned(text: str, width: int, column: int) -> str:
    return text.ljust(width) if column == 0 else text.rjust(width)


def put_into(page: Path) -> None:
    """Replace what is between the page's markers, of which every table has a pair."""
    text = page.read_text()
    for name, make in TABLES.items():
        before, begin, rest = text.partition(f"<!-- {name}: begin -->")
        _, end, after = rest.partition(f"<!-- {name}: end -->")
        if not (begin and end):
            raise SystemExit(f"{page} lacks the markers of {name}: <!-- {name}: begin --> and <!-- {name}: end -->")
        text = f"{before}{begin}\n\n{make()}\n\n{end}{after}"
    page.write_text(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, or put them into a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the tables between this page's markers")
    options = parser.parse_args(arguments)
    if options.into:
        put_into(options.into)
    else:
        print("\n\n".join(make() for make in TABLES.values()))


if __name__ == "__main__":
    main()
