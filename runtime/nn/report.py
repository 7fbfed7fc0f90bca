"""What `patch` did, as a table: a line for modules that fared alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """What became of one module.

    Attributes:
        state: a word for it.
        path: where the module stands in the model.
        cls: the name of its class.
        what: what was made of it, or why nothing.
    """

    state: str
    path: str
    cls: str
    what: str


def table(rows: Iterable[Row]) -> str:
    """A line for all rows that differ in their paths alone, with the first path, in the order in which they come."""
    paths: dict[tuple[str, str, str], list[str]] = {}
    for state, path, cls, what in rows:
        paths.setdefault((state, cls, what), []).append(path or "the model")
    lines = [(state, f"{len(at)} x {cls}", f"{what} [{at[0]}]") for (state, cls, what), at in paths.items()]
    widths = [max((len(line[column]) for line in lines), default=0) for column in (0, 1)]
    return "\n".join(f"{state:<{widths[0]}}  {modules:<{widths[1]}}  {what}" for state, modules, what in lines)
