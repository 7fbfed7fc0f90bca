"""Show how far a long run is, in one line on a terminal that is rewritten and removed at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from typing import TypeVar

_T = TypeVar("_T")

# Shorter runs show nothing.
_FIRST_S = 1.0
_BETWEEN_S = 0.2
_CLEAR = "\r\x1b[K"


def progress(items: Collection[_T], what: str) -> Iterator[_T]:
    """Iterate over items, and show on standard error how many are done if that is a terminal.

    Args:
        items: the items.
        what: what happens to each item, "modules rendered" for example.
    """
    if not sys.stderr.isatty():
        yield from items
        return
    due, is_shown = time.monotonic() + _FIRST_S, False
    try:
        for done, item in enumerate(items):
            if time.monotonic() >= due:
                print(f"{_CLEAR}{done} of {len(items)} {what}", end="", file=sys.stderr, flush=True)
                due, is_shown = time.monotonic() + _BETWEEN_S, True
            yield item
    finally:
        if is_shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
