"""The result of a soak: the full table, and its summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..evidence import Table, markdown
from .measure import SLACK
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
_KINDS, _FAILURES = "kinds of calls", "failures"
_HELD = ("held", "at start", "after warm-up", "at end", "slope per 1000 calls", "verdict")


def table(result: Result, header: Mapping[str, str]) -> Table:
    """Return the full table: a row per quantity that is held; the counts of calls in the header."""
    counts = {name: f"{result.done[name]:,}" for name in _COUNTS}
    counts |= {_KINDS: str(result.kinds), _FAILURES: str(len(result.failures))}
    rows = []
    for growth in result.growths:
        digits = 1 if growth.what.endswith("MiB") else 0
        shown = [f"{value:,.{digits}f}" for value in (growth.start, growth.first, growth.last)]
        verdict = "not judged" if SLACK[growth.what] is None else "held" if growth.ok else "GREW"
        rows.append((growth.what, *shown, f"{1000 * growth.slope:+.3f}", verdict))
    return Table.of({**header, "minutes": f"{result.seconds / 60:.1f}", **counts}, _HELD, rows)


def summary(table: Table) -> str:
    """Return the section of the page: the counts of calls, and a row per quantity that is held."""
    counts = {name: value for name, value in table.header.items() if name in (*_COUNTS, _KINDS, _FAILURES)}
    header = {name: value for name, value in table.header.items() if name not in counts}
    grown = [row["held"] for row in table.rows if row["verdict"] == "GREW"]
    failures = int(counts[_FAILURES])
    parts = [
        replace(table, header=header).where,
        f"**{f'{failures} calls were' if failures else 'No call was'} wrong, and {', '.join(grown) or 'nothing'} "
        f"grew**: {', '.join(f'{value} {name}' for name, value in counts.items())}.",
        markdown(_HELD, [[row[name] for name in _HELD] for row in table.rows]),
    ]
    return "\n\n".join(parts)
