"""What `make test` leaves to `make test-all`: cases marked `thorough`, by what they are and never by their names."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

import pytest

T = TypeVar("T")

THOROUGH = pytest.mark.thorough


def is_asked_for(config: pytest.Config) -> bool:
    """Whether a run takes thorough cases at all: what takes seconds to list is not listed for one that does not."""
    return "not thorough" not in config.option.markexpr


def first_of_each(cases: Iterable[T], kind: Callable[[T], Hashable]) -> Iterator[tuple[T, bool]]:
    """Each case, and whether it is the first of its kind."""
    seen: set[Hashable] = set()
    for case in cases:
        known = kind(case) in seen
        seen.add(kind(case))
        yield case, not known
