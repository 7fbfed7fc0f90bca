"""Computes the numbers of docs/derivations.md, and draws its pictures.

    python examples/derivations.py                                            # print the tables
    python examples/derivations.py --into docs/derivations.md --pictures docs/pictures

It needs matplotlib: `pip install -e '.[examples]'`. Everything is computed in numpy, on a CPU, additions in an order
that is written down here: two machines give the same numbers. Nothing is timed; what the picture of locks shows is a
model, whose times are made up.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# An array of numpy's; its own types say no more of what is computed here.
Array: TypeAlias = Any

_DPI = 110
_WIDTH = 11.0
RED, BLUE, GREEN, ORANGE, GREY = "crimson", "C0", "seagreen", "darkorange", "0.55"

COLUMNS = 4096
RATIOS = tuple(10**exponent for exponent in range(8))
_ROWS = 16


def row_sum(values: Array) -> Array:
    """The sum along rows of a power of two, by halves, as hardware adds up a row."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values


def by_squares(x: Array) -> Array:
    """The mean of the squares less the square of the mean."""
    n = np.float32(x.shape[1])
    mean = row_sum(x) / n
    return (x - mean) / np.sqrt(row_sum(x * x) / n - mean * mean)


def by_mean(x: Array) -> Array:
    """Deviations from the mean, squared."""
    n = np.float32(x.shape[1])
    centred = x - row_sum(x) / n
    return centred / np.sqrt(row_sum(centred * centred) / n)


def by_welford(x: Array) -> Array:
    """Welford's running mean and sum of squares, value by value."""
    mean, squares = (np.zeros((len(x), 1), np.float32) for _ in range(2))
    for count in range(x.shape[1]):
        value = x[:, count : count + 1]
        before = value - mean
        mean = mean + before / np.float32(count + 1)
        squares = squares + before * (value - mean)
    return (x - mean) / np.sqrt(squares / np.float32(x.shape[1]))


def by_pivot(x: Array) -> Array:
    """Deviations from a rounded mean, the pivot, whose own mean is measured and taken off."""
    n = np.float32(x.shape[1])
    centred = x - row_sum(x) / n
    shift = row_sum(centred) / n
    return (centred - shift) / np.sqrt(row_sum(centred * centred) / n - shift * shift)


WAYS: dict[str, tuple[Callable[[Array], Array], str]] = {
    "mean(x²) - mean(x)²": (by_squares, RED),
    "Welford": (by_welford, ORANGE),
    "around the mean": (by_mean, BLUE),
    "around a pivot": (by_pivot, GREEN),
}


def errors(way: Callable[[Array], Array], columns: int = COLUMNS) -> list[float]:
    """How far normalised rows are from fp64 at most, for each ratio of the mean to the standard deviation."""
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
    """Errors by way and ratio, as Markdown."""
    lines = [("mean / deviation", *map(_short, RATIOS))]
    for name, (way, _) in WAYS.items():
        lines.append((name, *map(_short, errors(way))))
    return table(lines)


def _short(number: float) -> str:
    return "NaN" if math.isnan(number) else f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e")


def variances_picture() -> Figure:
    """Errors over the ratio, with the two laws that they follow."""
    figure = Figure(figsize=(_WIDTH, 4.6), layout="constrained")
    axes = figure.subplots()
    ratios = np.array(RATIOS, dtype=float)
    for name, (way, colour) in WAYS.items():
        off = np.array(errors(way))
        axes.plot(ratios, off, marker="o", color=colour, label=name, linewidth=2.2 if way is by_pivot else 1.6)
        if np.isnan(off).any():
            lost = ratios[np.isnan(off)]
            axes.plot(lost, np.full(len(lost), 8.0), marker="x", linestyle="", color=colour, markersize=9)
            axes.annotate(
                "NaN: the variance is negative", (lost[0], 8.0), (0, 8), textcoords="offset points", color=colour
            )
    for power, text in ((2, r"$2^{-24}\,(\mu/\sigma)^2$"), (1, r"$2^{-24}\,\mu/\sigma$")):
        law = 2.0**-24 * ratios**power
        shown = law < 5
        axes.plot(ratios[shown], law[shown], color=GREY, linestyle=":", linewidth=1.2)
        at = int(shown.sum()) - 1
        axes.annotate(text, (ratios[at], law[at]), (8, -4), textcoords="offset points", color=GREY)
    axes.set(xscale="log", yscale="log", xlim=(0.5, 9e7), ylim=(1e-8, 60))
    axes.set_xlabel(r"mean over standard deviation, $\mu/\sigma$")
    axes.set_ylabel("largest error of a normalised value")
    axes.set_title(f"Rows of {COLUMNS} fp32 values, held against fp64")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(0.01, 0.62))
    return figure


M, N, MULTIPROCESSORS = 32768, 4096, 132
BUFFERS, PROGRAMS = 128, 2 * MULTIPROCESSORS
_ORDERS, _ORDER_ROWS, _ORDER_COLUMNS = 20, 4096, 512


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
    terms = (generator.standard_normal((2, _ORDER_ROWS, _ORDER_COLUMNS)).prod(0)).astype(np.float32)
    exact = terms.astype(np.float64).sum(0)
    chance = [in_turn(terms, 32, generator.permutation(_ORDER_ROWS)) for _ in range(_ORDERS)]
    fixed = [in_turn(terms, 32, np.arange(_ORDER_ROWS)) for _ in range(2)]
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
        f"{bytes_table}\n\nOf {_ORDER_COLUMNS} sums of {_ORDER_ROWS} rows, {differ} had other bits in one of {_ORDERS} "
        "orders than in the first; in a fixed order none had."
    )


class Span(NamedTuple):
    """What a program does for a while: a key of `_DOES`."""

    program: int
    start: float
    length: float
    what: str


_DOES = {
    "row": (GREEN, "a row: loads, sums, dx"),
    "wait": ("0.85", "waits for a lock"),
    "add": (RED, "adds to a shared sum"),
    "store": (BLUE, "stores its own sums"),
}
_SLOTS, _LOCKS, _TOTAL_ROWS = 12, 3, 60
_ROW_TIME, _ADD_TIME = 3.0, 1.1


def with_locks() -> list[Span]:
    """Programs of one row each: as one ends another begins in its place; who asked for a lock first has it first."""
    generator = np.random.default_rng(2)
    free = [(0.0, slot) for slot in range(_SLOTS)]
    held = [0.0] * _LOCKS
    asking: list[tuple[float, int, int]] = []
    spans: list[Span] = []
    row = 0
    while row < _TOTAL_ROWS or asking:
        if row < _TOTAL_ROWS and free and (not asking or free[0] <= asking[0][:2]):
            begin, slot = heapq.heappop(free)
            length = _ROW_TIME * generator.uniform(0.85, 1.15)
            spans.append(Span(slot, begin, length, "row"))
            heapq.heappush(asking, (begin + length, slot, row % _LOCKS))
            row += 1
        else:
            asked, slot, lock = heapq.heappop(asking)
            start = max(asked, held[lock])
            spans += [Span(slot, asked, start - asked, "wait"), Span(slot, start, _ADD_TIME, "add")]
            held[lock] = start + _ADD_TIME
            heapq.heappush(free, (held[lock], slot))
    return spans


def with_partial_sums() -> list[Span]:
    """As many programs as fit, each of which takes rows in turn and stores its sums once."""
    generator = np.random.default_rng(2)
    spans = []
    for slot in range(_SLOTS):
        now = 0.0
        for _ in range(slot, _TOTAL_ROWS, _SLOTS):
            length = _ROW_TIME * generator.uniform(0.85, 1.15)
            spans.append(Span(slot, now, length, "row"))
            now += length
        spans.append(Span(slot, now, _ADD_TIME, "store"))
    return spans


def sums_picture() -> Figure:
    """Programs over time with locks and with partial sums, and the sums that orders leave."""
    figure = Figure(figsize=(_WIDTH, 6.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1.0))
    left, right = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    locked, kept = with_locks(), with_partial_sums()
    last = max(span.start + span.length for span in (*locked, *kept))
    for axes, spans, title in (
        (left, locked, f"{_LOCKS} sums with a lock each"),
        (right, kept, "a sum of its own each"),
    ):
        _draw_spans(axes, spans, last)
        axes.set_title(f"{_TOTAL_ROWS} rows on {_SLOTS} programs, {title}", fontsize=10)
    handles = [Patch(color=colour, label=text) for colour, text in _DOES.values()]
    right.legend(handles=handles, loc="upper right", fontsize=8)
    _draw_orders(figure.add_subplot(grid[1, :]))
    return figure


def _draw_spans(axes: Axes, spans: Sequence[Span], last: float) -> None:
    for span in spans:
        colour = _DOES[span.what][0]
        axes.barh(
            span.program, span.length, left=span.start, height=0.82, color=colour, edgecolor="white", linewidth=0.6
        )
    axes.set(xlim=(0, last * 1.02), xlabel="time, as a model has it", ylabel="program", yticks=[])
    axes.invert_yaxis()


def _draw_orders(axes: Axes) -> None:
    chance, fixed = orders()
    columns = 48
    at = np.arange(columns)
    for each in chance[:, :columns]:
        axes.plot(at, 1e6 * each, marker="o", markersize=3, linestyle="", color=RED, alpha=0.35)
    axes.plot(at, 1e6 * fixed[0, :columns], marker="_", markersize=9, markeredgewidth=2, linestyle="", color=BLUE)
    axes.plot([], [], marker="o", markersize=4, linestyle="", color=RED, label=f"in {_ORDERS} orders, as locks have it")
    axes.plot([], [], marker="_", markersize=9, markeredgewidth=2, linestyle="", color=BLUE, label="in one order")
    axes.set_title(f"{columns} entries of dweight, sums of {_ORDER_ROWS} rows in fp32", fontsize=10)
    axes.set(xlabel="column", ylabel="error, 1e-6", xlim=(-1, columns))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize=8, ncols=2)


# Of one row: its values, and the gradient of what they are normalised to.
PAIR, PAIR_GRADIENT = np.array([1.9, 0.95]), np.array([-0.1, 1.5])
TRIPLE, TRIPLE_GRADIENT = np.array([0.6, -1.0, 1.4]), np.array([2.3, -0.1, 0.5])


def projections_picture() -> Figure:
    """What a norm takes off the gradient of a row: what lies along h, and along (1, 1, 1)."""
    figure = Figure(figsize=(_WIDTH, 4.9))
    figure.subplots_adjust(left=0.06, right=1.0, top=0.92, bottom=0.1, wspace=-0.04)
    _draw_pair(figure.add_subplot(1, 2, 1))
    _draw_triple(figure.add_subplot(1, 2, 2, projection="3d"))
    return figure


def _draw_pair(axes: Axes) -> None:
    """RMSNorm of two values: h is on a circle, and so is the next one."""
    h = PAIR / math.sqrt((PAIR * PAIR).mean())
    tangent = PAIR_GRADIENT - h * (PAIR_GRADIENT * h).mean()
    around = np.linspace(0, 2 * math.pi, 200)
    axes.plot(math.sqrt(2) * np.cos(around), math.sqrt(2) * np.sin(around), color=GREY, linewidth=1.2)
    axes.plot(*np.outer([0, 1.45], PAIR).T, color=GREY, linewidth=0.9, linestyle=":")
    for start, vector, colour in ((np.zeros(2), h, "black"), (h, PAIR_GRADIENT, BLUE), (h, tangent, RED)):
        style = {"arrowstyle": "-|>", "color": colour, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", tuple(start + vector), tuple(start), arrowprops=style)
    axes.plot(*zip(h + PAIR_GRADIENT, h + tangent, strict=True), color=BLUE, linestyle="--", linewidth=1)
    axes.plot(*PAIR, marker="o", color="black", markersize=5)
    for text, at, colour, offset in (
        ("s", PAIR, "black", (5, -12)),
        ("h", h / 2, "black", (2, -14)),
        ("g", h + PAIR_GRADIENT, BLUE, (7, -3)),
        ("dx / rstd", h + tangent, RED, (-58, -2)),
        (r"$h\;\mathrm{mean}(g\,h)$", h + (PAIR_GRADIENT + tangent) / 2, BLUE, (-48, 13)),
        (r"radius $\sqrt{2}$", np.array([-1.0, -1.0]), GREY, (-52, -10)),
    ):
        axes.annotate(text, tuple(at), offset, textcoords="offset points", color=colour)
    axes.set(xlim=(-2.1, 3.0), ylim=(-1.8, 2.6), aspect="equal", xlabel="first value", ylabel="second value")
    axes.set_title("RMSNorm, N = 2: what lies along h is taken off", fontsize=10)
    axes.grid(alpha=0.3)


def _draw_triple(axes: Any) -> None:
    """LayerNorm of three values, with (1, 1, 1) upright: rows of mean 0 are the floor, and h is on a circle."""
    frame = np.array([[1, -1, 0], [1, 1, -2], [1, 1, 1]]) / np.sqrt([[2], [6], [3]])
    centred = TRIPLE - TRIPLE.mean()
    h = centred / math.sqrt((centred * centred).mean())
    floored = TRIPLE_GRADIENT - TRIPLE_GRADIENT.mean()
    dx = floored - h * (floored * h).mean()

    def draw(start: Array, end: Array, **style: Any) -> None:
        axes.plot(*(frame @ np.array([start, end]).T), **style)

    around = np.linspace(0, 2 * math.pi, 200)
    circle = np.array([np.cos(around), np.sin(around), 0 * around])
    # In the order in which it is drawn, not by depth: the floor would hide what stands on it.
    axes.computed_zorder = False
    floor = 2.7
    disc = np.linspace(0, floor, 2)[:, None, None] * circle
    axes.plot_surface(
        *disc.transpose(1, 0, 2), color="0.93", shade=False, antialiased=False, rcount=2, ccount=200, zorder=0
    )
    axes.plot(*math.sqrt(3) * circle, color=GREY, linewidth=1.2)
    draw(np.zeros(3), 1.5 * np.ones(3), color=GREY, linewidth=0.9, linestyle=":")
    for start, vector, colour in ((np.zeros(3), h, "black"), (h, TRIPLE_GRADIENT, BLUE), (h, dx, RED)):
        axes.quiver(*(frame @ start), *(frame @ vector), color=colour, linewidth=2, arrow_length_ratio=0.1, zorder=4)
    draw(h + TRIPLE_GRADIENT, h + floored, color=BLUE, linestyle="--", linewidth=1)
    draw(h + floored, h + dx, color=BLUE, linestyle="--", linewidth=1)
    for text, at, colour, beside in (
        ("h", h / 2, "black", (0, 0, 0.12)),
        ("g", h + TRIPLE_GRADIENT, BLUE, (0, 0.1, 0.1)),
        ("dx / rstd", h + dx / 2, RED, (-0.2, -0.1, -0.42)),
        ("mean(g)", h + (TRIPLE_GRADIENT + floored) / 2, BLUE, (0, 0.12, 0)),
        ("(1, 1, 1)", 1.5 * np.ones(3), GREY, (0, 0.1, 0)),
    ):
        axes.text(*(frame @ at + beside), text, color=colour, zorder=5)
    axes.text(-1.5, 1.55, 0, "rows of mean 0", color=GREY, zorder=5)
    axes.set_title("LayerNorm, N = 3: and what lies along (1, 1, 1)", fontsize=10)
    axes.set_axis_off()
    axes.view_init(elev=28, azim=-62)
    axes.set(xlim=(-floor, floor), ylim=(-floor, floor), zlim=(0, 2.8))
    axes.set_box_aspect((5.4, 5.4, 2.8), zoom=1.35)


PICTURES: dict[str, Callable[[], Figure]] = {
    "projections": projections_picture,
    "variances": variances_picture,
    "sums": sums_picture,
}
TABLES: dict[str, Callable[[], str]] = {"variances": variances_table, "sums": sums_table}


def table(lines: Sequence[Sequence[str]]) -> str:
    """Lines as a Markdown table, the first of them its head."""
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
    """Print the tables, or put them into a page, and draw the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the tables between this page's markers")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the pictures into this folder")
    options = parser.parse_args(arguments)
    if options.into:
        put_into(options.into)
    else:
        print("\n\n".join(make() for make in TABLES.values()))
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
        for name, draw in PICTURES.items():
            figure = draw()
            FigureCanvasAgg(figure)
            figure.savefig(options.pictures / f"{name}.png", dpi=_DPI, metadata={"Software": None})


if __name__ == "__main__":
    main()
