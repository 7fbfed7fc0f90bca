"""How rows lie in memory, as accuracy is measured."""

from __future__ import annotations

from enum import Enum


class Layout(Enum):
    """How rows lie in memory; the value is what names and reports call it."""

    ADJOINING = ""
    HEADS = "heads"
    HEADS_IN_PLACE = "heads in place"
