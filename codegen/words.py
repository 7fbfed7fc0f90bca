"""How an error speaks of a word that is not one of the legal ones."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def unknown(what: str, word: str, legal: Sequence[str]) -> str:
    """Say that a word is unknown, which legal one is nearest, and which there are."""
    near = nearest(word, legal)
    meant = f"; did you mean {near}? Use" if near else "; use"
    return f"unknown {what} {word!r}{meant} {one_of(legal)}"


def nearest(word: str, legal: Sequence[str]) -> str | None:
    """The legal word that a word may have been meant to be."""
    near = difflib.get_close_matches(word.lower(), legal, n=1)
    return near[0] if near else None


def one_of(legal: Sequence[str]) -> str:
    """The legal words as a phrase."""
    return legal[0] if len(legal) == 1 else f"one of {', '.join(legal)}"
