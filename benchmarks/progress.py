"""One kind of progress bar: alive on a terminal, a line every now and then in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NoReturn, TypeVar

from tqdm import tqdm

T = TypeVar("T")

_SECONDS_BETWEEN_LINES = 10.0


def progress_over(items: Iterable[T], *, what: str, unit: str, total: int | None = None) -> tqdm[T]:
    """Return a bar that moves as items are taken; total is the number of items if items have no length."""
    return tqdm(items, total=total, desc=what, unit=unit, dynamic_ncols=True, mininterval=_interval())


def progress_to(total: int, *, what: str, unit: str) -> tqdm[NoReturn]:
    """Return a bar that the caller moves."""
    return tqdm(total=total, desc=what, unit=unit, dynamic_ncols=True, mininterval=_interval())


def _interval() -> float:
    return 0.1 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES
