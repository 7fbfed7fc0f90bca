"""A table of texts, as pages and terminals show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tabulate import tabulate


class Grid(NamedTuple):
    """A table of texts.

    Attributes:
        title: above it; empty for none.
        heads: of the columns.
        lines: its cells.
        notes: sentences below it.
    """

    title: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Return the table as Markdown."""
        parts = [f"**{self.title}**"] if self.title else []
        return "\n\n".join([*parts, self.cells("github"), *self.notes])

    def cells(self, form: str) -> str:
        """Return the cells in one of tabulate's formats, first column to the left and others to the right."""
        align = ("left", *("right" for _ in self.heads[1:]))
        return tabulate(self.lines, self.heads, tablefmt=form, disable_numparse=True, colalign=align)
