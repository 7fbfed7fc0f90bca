"""Heat maps of a suite of drawn cells: the share of the copy's speed, and the lead over the best peer."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from .reach import Finding
from .results import Results
from .suites import SUITES
from .suites.sweep import GROUPS
from .swept import findings_of

_PANEL = (7.2, 1.9)
# Between the scale of colours and the panels, in inches.
_GAP = 0.2
_FAILS, _UNKNOWN = "black", "lightgrey"
_TICKS = tuple(2**power for power in range(5, 18, 2))
# How many times its N, or which part of it, a cell's colour reaches at most.
_REACH = 2.0

_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_LEADS = (0.5, 0.7, 1.0, 1.4, 2.0)


@dataclass(frozen=True)
class _Column:
    """A column of panels: its label, ratio, colour scale, and the scale's ticks."""

    label: str
    ratio: Callable[[Finding], float | None]
    scale: Normalize
    ticks: tuple[float, ...]


_COLUMNS = (
    _Column("share of the speed of a copy of x", lambda finding: finding.to_copy, Normalize(0.5, 1.0), _SHARES),
    _Column("lead over the best peer", lambda finding: finding.to_peer, LogNorm(0.5, 2.0), _LEADS),
)


def swept_map(results: Results) -> Figure | None:
    """Two panels a task and norm, N by size or rows; None where nothing is timed.

    A cell's colour reaches halfway, in log N, to those beside it in its line, and a dot says where it is.
    """
    panels: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings_of(results):
        panels.setdefault((finding.row.task, finding.row.kind), []).append(finding)
    if not any(finding.row.ok for found in panels.values() for finding in found):
        return None
    figure = Figure(figsize=(_PANEL[0] * 2, _PANEL[1] * len(panels) + 1.4), layout="constrained")
    places = zip(*figure.subplots(len(panels), 2, squeeze=False), strict=True)
    for column, all_axes in zip(_COLUMNS, places, strict=True):
        colours = ScalarMappable(column.scale, "RdYlGn")
        for axes, (key, found) in zip(all_axes, panels.items(), strict=True):
            _draw(axes, found, column.ratio, colours)
            axes.set_title(", ".join(key), fontsize=9)
        all_axes[-1].set_xlabel("N")
        # A share of the panels' height, which is up to 50 inches.
        pad = _GAP / figure.get_figheight()
        bar = figure.colorbar(colours, ax=all_axes, location="top", shrink=0.8, aspect=40, pad=pad, extend="both")
        bar.set_ticks(column.ticks, labels=[f"{tick:g}" for tick in column.ticks])
        bar.minorticks_off()
        bar.set_label(column.label)
    header = results.header
    figure.suptitle(
        f"{SUITES[results.suite].title}, seed {results.seed}: {header['device']}, revision {header['revision']}\n"
        "a dot is a cell; black: normforge fails; grey: not measured, or nothing to hold it against",
        fontsize=10,
    )
    return figure


def _draw(
    axes: Axes, found: Sequence[Finding], ratio: Callable[[Finding], float | None], colours: ScalarMappable
) -> None:
    axes.set_facecolor(_UNKNOWN)
    for line, group in enumerate(GROUPS):
        cells = sorted((finding for finding in found if finding.row.group == group), key=lambda one: one.row.n)
        if not cells:
            continue
        lengths = [finding.row.n for finding in cells]
        halfway = [math.sqrt(one * other) for one, other in pairwise(lengths)]
        lows = [max(n / _REACH, low) for n, low in zip(lengths, [0.0, *halfway], strict=True)]
        highs = [min(n * _REACH, high) for n, high in zip(lengths, [*halfway, math.inf], strict=True)]
        shown = [_colour(finding, ratio(finding), colours) for finding in cells]
        spans = [(low, high - low) for low, high in zip(lows, highs, strict=True)]
        axes.broken_barh(spans, (line - 0.5, 1), facecolors=shown)
        axes.plot(lengths, [line] * len(lengths), linestyle="", marker=".", markersize=2, color="black")
    axes.set_xscale("log", base=2)
    axes.set_xlim(_TICKS[0] / 1.4, _TICKS[-1] * 1.4)
    axes.set_xticks(_TICKS, [str(tick) for tick in _TICKS], fontsize=8)
    axes.set_ylim(-0.5, len(GROUPS) - 0.5)
    axes.set_yticks(range(len(GROUPS)), GROUPS, fontsize=7)


def _colour(finding: Finding, ratio: float | None, colours: ScalarMappable) -> object:
    if not finding.row.ok:
        return _FAILS
    return _UNKNOWN if ratio is None else colours.cmap(float(colours.norm(min(ratio, sys.float_info.max))))
