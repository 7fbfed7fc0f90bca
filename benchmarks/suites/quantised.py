"""Norms quantised as engines have it: fp8 in groups of 128 columns, beside a scale a row and one that is given."""

from __future__ import annotations

from itertools import product
from typing import Any

from ..cells import Method, Norm, QuantisedCell, Suite, Task

_LENGTHS = (2048, 4096, 5120, 7168, 8192)
_ROWS = (1024, 4096, 16384)

_GROUPS: dict[str, Any] = {"columns": 128}
_COLUMN = _GROUPS | {"column_major": True}
# Requests, by the part of the suite that they make.
_EVERYWHERE: dict[str, dict[str, Any]] = {"groups": _GROUPS, "a scale a row": {}}
_ADDED: dict[str, dict[str, Any]] = {
    "groups, column-major": _COLUMN,
    "a scale that is given": {"static": True},
    "two outputs": _GROUPS | {"unquantised": True},
}
_PACKED = _COLUMN | {"packed": True}


def cells_of(rows: tuple[int, ...]) -> tuple[QuantisedCell, ...]:
    """Return the cells with some rows: with an add all at every length, without one the rarer ones at one length."""
    added, alone = Task.ADD_QUANTISED, Task.QUANTISED
    parts = [
        *product((added, alone), _EVERYWHERE.items(), _LENGTHS),
        *product((added,), _ADDED.items(), _LENGTHS),
        *product((alone,), _ADDED.items(), (4096,)),
        *product((added,), [("groups, packed", _PACKED)], (4096, 7168)),
    ]
    return tuple(
        QuantisedCell(task, norm, m, n, group=group, **options)
        for (task, (group, options), n), norm, m in product(parts, Norm, rows)
    )


SUITE = Suite("quantised", "Quantised as engines have it", Method.COLD, cells_of(_ROWS), sweeps=False)
