"""How an error speaks of a word that is not one of the legal ones."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_LONGEST = 80


def unknown(what: str, word: str, legal: Sequence[str]) -> str:
    """Say that a word is unknown, which legal one is nearest, and which there are."""
    near = nearest(word, legal)
    meant = f"; did you mean {near}? Use" if near else "; use"
    return f"unknown {what} {shortened(word)!r}{meant} {one_of(legal)}"


def printable(text: str) -> str:
    """A text on one line, where whatever a terminal would act on is its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shortened(word: str) -> str:
    """A word, or as much of it as a message has room for."""
    return word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."


def nearest(word: str, legal: Sequence[str]) -> str | None:
    """The legal word that a word may have been meant to be."""
    near = difflib.get_close_matches(shortened(word).lower(), legal, n=1)
    return near[0] if near else None


def one_of(legal: Sequence[str]) -> str:
    """The legal words as a phrase."""
    return legal[0] if len(legal) == 1 else f"one of {', '.join(legal)}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 module", "2 modules"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
