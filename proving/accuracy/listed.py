"""Modes and tiles of `cases.yaml`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import yaml

from normforge.codegen.instance import Tile
from normforge.codegen.values import Direction, Pipeline

M = TypeVar("M")

_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())

# A tile, and the row lengths that it is measured at.
Variants = list[tuple[Tile, list[int]]]


def modes_of(kind: str, norms: Sequence[str], named: Callable[[str], M]) -> dict[Direction, tuple[M, ...]]:
    """Return the modes of a kind by direction: of norms by their words in names, and by what makes one of a name."""
    return {
        Direction(way): tuple(named(f"{norm}_{way}_{rest}") for norm, rest in product(norms, names))
        for way, names in _TABLE["modes"][kind].items()
    }


def tiles_of(where: str, what: str) -> Variants:
    """Return the tiles of a direction or of groups, "interpreted" or "compiled", and the lengths of each."""
    return [
        (Tile(Pipeline(pipeline), *numbers), row["n"])
        for row in _TABLE["tiles"][where][what]
        for pipeline, *numbers in [row["tile"]]
    ]
