"""A soak's result as tables: for a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from tabulate import tabulate

from .soak import Result

_COUNTS = (
    "forward calls",
    "training steps",
    "backward calls",
    "refused calls",
    "graphs captured",
    "graph replays",
    "checks",
)


def report(result: Result, header: Mapping[str, str], *, markdown: bool = False) -> str:
    """The tables; failures, if there are any, after them."""
    style = "github" if markdown else "simple"
    counts = [(name, f"{result.done[name]:,}") for name in _COUNTS]
    counts += [("kinds of calls", str(result.kinds)), ("failures", str(len(result.failures)))]
    parts = [
        ", ".join(f"{name} {value}" for name, value in header.items()) + f", {result.seconds / 60:.1f} minutes.",
        tabulate(counts, ("", "how many"), tablefmt=style, colalign=("left", "right"), disable_numparse=True),
        tabulate(
            _held(result), _HELD, tablefmt=style, colalign=("left", *["right"] * 4, "left"), disable_numparse=True
        ),
    ]
    parts += [f"```text\n{failure}\n```" if markdown else failure for failure in result.failures]
    return "\n\n".join(parts) + "\n"


_HELD = ("held", "at start", "after warm-up", "at end", "slope per 1000 calls", "verdict")


def _held(result: Result) -> list[tuple[str, ...]]:
    rows = []
    for growth in result.growths:
        unit = growth.quantity.unit
        shown = [
            f"{value / unit:,.1f}" if unit > 1 else f"{value:,.0f}"
            for value in (growth.start, growth.first, growth.last)
        ]
        verdict = "not judged" if growth.quantity.slack is None else "held" if growth.ok else "GREW"
        rows.append((growth.quantity.name, *shown, f"{1000 * growth.slope / unit:+.3f}", verdict))
    return rows
