"""The picture of the table: how many times torch's speed each variant has, a panel for each step, dtype and run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..pictures import save
from .names import SUITE
from .table import Row, Table, beside_torch, panel_titles
from .variants import VARIANTS

_PANEL = (7.0, 2.6)
# Entries in a line of the legend: six are wider than a panel.
_LEGEND = 3
_COLOURS = {
    "torch": "grey",
    "patch": "crimson",
    "patch-passes": "darkred",
    "patch-unfused": "lightcoral",
    "liger": "C0",
    "liger-apply": "C9",
    "torch-again": "silver",
}

Panels = dict[str, list[Row]]


def draw(table: Table, folder: Path) -> Path | None:
    """Draw the table into its folder, and name the file; None where no two times can be compared."""
    figure = picture(table)
    if figure is None:
        return None
    return save(figure, folder / f"{SUITE}.png")


def picture(table: Table) -> Figure | None:
    """Bars of torch's eager time over each variant's; None where there are none."""
    panels = {
        title: rows
        for title, rows in panel_titles(table).items()
        if any(beside_torch(table, row) is not None for row in rows)
    }
    if not panels:
        return None
    figure = Figure(figsize=(_PANEL[0], _PANEL[1] * len(panels) + 0.8), layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(len(panels), 1, squeeze=False).flat, panels.items(), strict=True):
        _draw(axes, table, rows)
        axes.set_title(title, fontsize=9)
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=_LEGEND)
    figure.suptitle(
        f"Times the speed of eager torch, {table.header['device']}, revision {table.header['revision']}", fontsize=10
    )
    return figure


def _draw(axes: Axes, table: Table, rows: Sequence[Row]) -> None:
    models = list(dict.fromkeys(row.model for row in rows))
    shown = [name for name in VARIANTS if any(row.variant == name for row in rows)]
    width = 0.8 / len(shown)
    for place, name in enumerate(shown):
        bars = {row.model: speed for row in rows if row.variant == name and (speed := beside_torch(table, row))}
        at = [models.index(model) - 0.4 + width * (place + 0.5) for model in bars]
        drawn = axes.bar(at, list(bars.values()), width, label=VARIANTS[name].label, color=_COLOURS.get(name, "C4"))
        axes.bar_label(drawn, fmt="%.2f", fontsize=5, rotation=90, padding=1)
    axes.axhline(1.0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(models)), models, fontsize=8)
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.3)
