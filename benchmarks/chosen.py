"""What a command line names: which cells, and where results lie if it does not say."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def matching(ids: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The ids that one of the patterns matches as a whole or is a part of; no patterns match all."""
    if not patterns:
        return list(ids)
    return [one for one in ids if any(pattern in one or fnmatch(one, pattern) for pattern in patterns)]
