"""Suites, cells and folders of results that a command line names, or leaves to the default."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UsageError

if TYPE_CHECKING:
    from .cells import Suite

RESULTS = Path(__file__).resolve().parent / "results"
# The folders that an overview is of, by card: one run per kind of figure.
OVERVIEW = (
    *("h200", "h200-sweep", "h200-family", "h200-groupnorm", "h200-dropout", "h200-fp8-inputs", "h200-heads"),
    *("h200-quantised", "h200-models"),
)


def of_seed(suites: Sequence[Suite], seed: int | None) -> list[Suite]:
    """Return the suites with the cells of a seed, where cells are drawn; None leaves suites as they are.

    Raises:
        UsageError: a seed is given, and no suite has anything to draw.
    """
    if seed is not None and not any(suite.draw for suite in suites):
        names = " ".join(suite.name for suite in suites)
        raise UsageError(f"--seed {seed} draws no cell of --suite {names}; leave it out, or add --suite sweep")
    return [suite.of_seed(seed) for suite in suites]


def matching(cells: Sequence[Any], patterns: Sequence[str]) -> list[Any]:
    """Return the cells whose id a pattern matches as a whole or is a part of; no patterns match all."""
    if not patterns:
        return list(cells)
    return [cell for cell in cells if any(pattern in cell.id or fnmatch(cell.id, pattern) for pattern in patterns)]
