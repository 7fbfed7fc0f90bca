"""Pictures of results: lines over the row length or the number of rows, heat maps of ratios, and the README's."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter
from PIL import Image

from .cells import Method
from .providers import every_provider
from .results import CEILING, PROJECT, Results, Row
from .suites import SUITES

_COLUMNS = 2
_PANEL = (6.4, 3.6)
_DPI = 110
# Colours of a picture: its lines, their edges, and the shades of a heat map.
_PALETTE = 64

Panels = dict[tuple[str, str, str], list[Row]]

# The README's picture: its file's name, and the panel that it takes of each suite.
OVERVIEW = "overview"
_DIRECTIONS = ("forward", "backward")
_SHOWN = ("ln_bf16", "256 MiB")

# C3 of matplotlib's ten colours is too near to the project's own.
_COLOURS = (
    *(f"C{index}" for index in (0, 1, 2, 4, 5, 6, 7, 8, 9)),
    *("navy", "teal", "dodgerblue", "yellowgreen", "goldenrod", "slategrey", "indigo"),
)


def draw_all(found: Sequence[Results], folder: Path) -> Iterator[Path]:
    """Draw every suite's pictures into a folder, and name the files."""
    for results in found:
        suite, panels = SUITES[results.suite], _panels(results)
        if suite.draw is not None:
            continue
        lines = {key: rows for key, rows in panels.items() if len({_position(results, row) for row in rows}) > 1}
        if suite.sweeps and lines:
            yield save(_lines(results, lines), folder / f"{results.suite}.png")
        if not suite.sweeps and _with_ratios(panels):
            yield save(heat_map(results), folder / f"{results.suite}-ratios.png")
    if figure := overview(found):
        yield save(figure, folder / f"{OVERVIEW}.png")


def overview(found: Sequence[Results]) -> Figure | None:
    """LayerNorm forward and backward over N, side by side: what the README shows; None where one is missing."""
    rows = {results.suite: (results, _panels(results).get((results.suite, *_SHOWN), [])) for results in found}
    if not all(rows.get(suite, (None, ()))[1] for suite in _DIRECTIONS):
        return None
    figure = Figure(figsize=(_PANEL[0] * 2, _PANEL[1] + 0.9), layout="constrained")
    for axes, suite in zip(figure.subplots(1, 2).flat, _DIRECTIONS, strict=True):
        results, shown = rows[suite]
        _draw_lines(axes, results, shown)
        axes.set(title=f"LayerNorm {suite}, bf16", xlabel="N, in tensors of 256 MiB", ylabel=SUITES[suite].unit)
    _add_legend(figure, columns=7)
    header = rows[_DIRECTIONS[0]][0].header
    figure.suptitle(f"{header['device']}, revision {header['revision']}", fontsize=10)
    return figure


def _panels(results: Results) -> Panels:
    panels: Panels = {}
    for row in results.rows.values():
        if row.ok:
            group = "" if SUITES[results.suite].method is Method.HOST else row.group
            panels.setdefault((row.task, row.kind, group), []).append(row)
    return panels


def _position(results: Results, row: Row) -> int:
    return row.m if SUITES[results.suite].along == "m" else row.n


def _value(results: Results, row: Row) -> float:
    return row.gb_per_s if SUITES[results.suite].unit == "GB/s" else row.us


def _lines(results: Results, panels: Panels) -> Figure:
    suite = SUITES[results.suite]
    depth = math.ceil(len(panels) / _COLUMNS)
    figure = Figure(figsize=(_PANEL[0] * _COLUMNS, _PANEL[1] * depth + 0.8), layout="constrained")
    all_axes = figure.subplots(depth, _COLUMNS, squeeze=False).flat
    for axes, (key, rows) in zip(all_axes, panels.items(), strict=False):
        _draw_lines(axes, results, rows)
        axes.set(title=", ".join(filter(None, key)), xlabel=suite.along.upper(), ylabel=suite.unit)
    for axes in list(all_axes)[len(panels) :]:
        axes.remove()
    _add_legend(figure, columns=5)
    figure.suptitle(f"{suite.title}, {results.header['device']}")
    return figure


def _add_legend(figure: Figure, columns: int) -> None:
    # Axes differ in which providers offer them; the legend has each once.
    shown = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles = {label: handle for pair in shown for handle, label in zip(*pair, strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def colours_of_peers() -> dict[str, str]:
    """Return a colour for each provider, the same in every panel, whichever others are in it."""
    order = [name for name, peer in every_provider().items() if name not in (CEILING, PROJECT) and not peer.groups]
    return dict(zip(order, _COLOURS, strict=False))


def _draw_lines(axes: Axes, results: Results, rows: Sequence[Row]) -> None:
    colours = colours_of_peers()
    for name, label in _labels(rows):
        points = sorted((_position(results, row), _value(results, row)) for row in rows if row.provider == name)
        style: dict[str, dict[str, Any]] = {
            CEILING: {"color": "black", "linestyle": "--"},
            PROJECT: {"color": "crimson", "linewidth": 2.5},
        }
        options = style.get(name, {"color": colours.get(name, "grey"), "linewidth": 1.2})
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label, **options)
    axes.set_xscale("log", base=2)
    if SUITES[results.suite].unit == "GB/s":
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    ticks = sorted({_position(results, row) for row in rows})
    shown = [tick for tick in ticks if tick & (tick - 1) == 0] or ticks
    axes.set_xticks(shown, [str(tick) for tick in shown], rotation=45, fontsize=8)
    axes.grid(alpha=0.3)


def _with_ratios(panels: Panels) -> Panels:
    # A panel of the ceiling alone, where all others fail, has no ratio to show.
    return {key: rows for key, rows in panels.items() if any(row.provider != CEILING for row in rows)}


def heat_map(results: Results) -> Figure:
    """Each provider's throughput over the copy's, or the fastest time over its own, a column a cell."""
    panels = _with_ratios(_panels(results))
    heights = [len(_labels(rows)) + 2.5 for rows in panels.values()]
    figure = Figure(figsize=(13, 0.3 * sum(heights) + 0.8), layout="constrained")
    suite = SUITES[results.suite]
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights).flat
    for axes, (key, rows) in zip(all_axes, panels.items(), strict=True):
        _draw_heat(axes, results, rows)
        axes.set_title(", ".join(filter(None, key)), fontsize=9)
    what = "throughput over that of a copy of x" if suite.has_ceiling else "fastest time over each provider's"
    figure.suptitle(f"{suite.title}, {results.header['device']}: {what}")
    return figure


def _draw_heat(axes: Axes, results: Results, rows: Sequence[Row]) -> None:
    cells = {row.cell: row for row in rows}
    columns = sorted(cells, key=lambda cell: (_position(results, cells[cell]), cells[cell].m))
    labels = [(name, label) for name, label in _labels(rows) if name != CEILING]
    grid = [[math.nan] * len(columns) for _ in labels]
    for row in rows:
        if row.provider != CEILING:
            line = [name for name, _ in labels].index(row.provider)
            grid[line][columns.index(row.cell)] = _ratio(results, row)
    axes.imshow(grid, aspect="auto", cmap="RdYlGn", vmin=0.0, vmax=1.0)
    for line, values in enumerate(grid):
        for column, value in enumerate(values):
            text = "–" if math.isnan(value) else f"{value:.2f}"
            axes.text(column, line, text, ha="center", va="center", fontsize=7)
    shapes = [f"{cells[cell].m}×{cells[cell].n}" for cell in columns]
    axes.set_xticks(range(len(columns)), shapes, rotation=20, ha="right", fontsize=7)
    axes.set_yticks(range(len(labels)), [label for _, label in labels], fontsize=8)


def _ratio(results: Results, row: Row) -> float:
    if SUITES[results.suite].has_ceiling:
        ratio = results.ratio_to_copy(row)
        return math.nan if ratio is None else ratio
    timed = [other.us for name, other in results.of(row.cell).items() if other.ok and name != CEILING]
    return min(timed) / row.us


def _labels(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Names and labels of the rows' providers, in the order of every table."""
    names = {row.provider for row in rows}
    known = {name: provider.label for name, provider in every_provider().items() if name in names}
    return [*known.items(), *((name, name) for name in sorted(names - known.keys()))]


def save(figure: Figure, path: Path) -> Path:
    """Write a figure, and return where."""
    FigureCanvasAgg(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=_DPI)
    # A palette makes the file a quarter as large; matplotlib's version is left out, so that bytes follow from results.
    colours = Image.open(drawn).convert("RGB").quantize(_PALETTE, dither=Image.Dither.NONE)
    colours.save(path, optimize=True, dpi=(_DPI, _DPI))
    return path
