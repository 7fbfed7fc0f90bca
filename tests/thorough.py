"""What `make test` leaves to `make test-all`: cases marked `thorough`, by what they are and never by their names.

A test of several parameters runs each value of each, and with time every combination. Where cases come from a table,
`first_of_each` says which stand for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

THOROUGH = pytest.mark.thorough
# A test of several seconds, begun before the others: one that begins last is waited for by all other workers.
LONG = pytest.mark.long
# A test whose cases take five seconds or more in all: a quick run takes one in three of them.
COSTLY = pytest.mark.costly
# Marks that a run may exclude.
MARKS = ("compile", "gpu", "thorough")


def is_asked_for(config: pytest.Config) -> bool:
    """Whether a run takes thorough cases at all: what takes seconds to list is not listed for one that does not."""
    return "not thorough" not in config.option.markexpr


def compiles_alone(config: pytest.Config) -> bool:
    """Whether a run takes nothing but what is compiled."""
    chosen = config.option.markexpr
    return "compile" in chosen and "not compile" not in chosen and " or " not in chosen


def is_run(metafunc: pytest.Metafunc) -> bool:
    """Whether a run may take a test at all, as far as compiling goes."""
    chosen = metafunc.config.option.markexpr
    compiles = metafunc.definition.get_closest_marker("compile") is not None
    return not chosen or compiles == ("compile" in chosen and "not compile" not in chosen)


def leave_out(metafunc: pytest.Metafunc) -> None:
    """Drop a test's cases with a mark that a run excludes; of a test without any other, one stays to be deselected."""
    chosen = metafunc.config.option.markexpr
    excluded = set() if " or " in chosen else {mark for mark in MARKS if f"not {mark}" in chosen}
    calls = metafunc._calls
    metafunc._calls = [call for call in calls if excluded.isdisjoint(mark.name for mark in call.marks)] or calls[:1]


def first_of_each(cases: Iterable[T], kind: Callable[[T], Hashable], name: Callable[[T], str]) -> list[Any]:
    """Parameters of a test: the first case of each kind, and the others, and all of kind None, as thorough ones."""
    seen: set[Hashable] = {None}
    made = []
    for case in cases:
        marks = [THOROUGH] if kind(case) in seen else []
        seen.add(kind(case))
        made.append(pytest.param(case, id=name(case), marks=marks))
    return made
