"""Draws the pictures of docs/explanation/derivations.md, of what `derivations.py` beside it computes.

    python examples/derivation_pictures.py docs/explanation/pictures

It needs matplotlib: `pip install -e '.[examples]'`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from derivations import (
    COLUMNS,
    LOCKS,
    ORDER_ROWS,
    ORDERS,
    RATIOS,
    SLOTS,
    TOTAL_ROWS,
    WAYS,
    Array,
    Span,
    by_pivot,
    errors,
    orders,
    with_locks,
    with_partial_sums,
)
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

_DPI = 110


_WIDTH = 11.0


RED, BLUE, GREEN, ORANGE, GREY = "crimson", "C0", "seagreen", "darkorange", "0.55"


def variances_picture() -> Figure:
    """Errors over the ratio, with the two laws that they follow."""
    figure = Figure(figsize=(_WIDTH, 4.6), layout="constrained")
    axes = figure.subplots()
    ratios = np.array(RATIOS, dtype=float)
    for (name, way), colour in zip(WAYS.items(), (RED, ORANGE, BLUE, GREEN), strict=True):
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


_DOES = {
    "row": (GREEN, "a row: loads, sums, dx"),
    "wait": ("0.85", "waits for a lock"),
    "add": (RED, "adds to a shared sum"),
    "store": (BLUE, "stores its own sums"),
}


def sums_picture() -> Figure:
    """Programs over time with locks and with partial sums, and the sums that orders leave."""
    figure = Figure(figsize=(_WIDTH, 6.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1.0))
    left, right = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    locked, kept = with_locks(), with_partial_sums()
    last = max(span.start + span.length for span in (*locked, *kept))
    for axes, spans, title in (
        (left, locked, f"{LOCKS} sums with a lock each"),
        (right, kept, "a sum of its own each"),
    ):
        _draw_spans(axes, spans, last)
        axes.set_title(f"{TOTAL_ROWS} rows on {SLOTS} programs, {title}", fontsize=10)
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
    axes.plot([], [], marker="o", markersize=4, linestyle="", color=RED, label=f"in {ORDERS} orders, as locks have it")
    axes.plot([], [], marker="_", markersize=9, markeredgewidth=2, linestyle="", color=BLUE, label="in one order")
    axes.set_title(f"{columns} entries of dweight, sums of {ORDER_ROWS} rows in fp32", fontsize=10)
    axes.set(xlabel="column", ylabel="error, 1e-6", xlim=(-1, columns))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize=8, ncols=2)


PAIR, PAIR_GRADIENT = np.array([1.9, 0.95]), np.array([-0.1, 1.5])


TRIPLE, TRIPLE_GRADIENT = np.array([0.6, -1.0, 1.4]), np.array([2.3, -0.1, 0.5])


def projections_picture() -> Figure:
    """Draw the parts that a norm removes from the gradient of a row: along h, and along (1, 1, 1)."""
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where they are drawn; made if it is not there")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw()
        FigureCanvasAgg(figure)
        figure.savefig(folder / f"{name}.png", dpi=_DPI, metadata={"Software": None})


if __name__ == "__main__":
    main()
