"""Describe words in error messages, unknown ones above all."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_LONGEST = 80


def unknown(what: str, word: str, legal: Sequence[str]) -> str:
    """Return a message that a word is unknown, with the nearest legal word and all legal words."""
    near = nearest(word, legal)
    meant = f"; did you mean {near}? Use" if near else "; use"
    return f"unknown {what} {shortened(word)!r}{meant} {one_of(legal)}"


def printable(text: str) -> str:
    """Return a text on one line, with everything that a terminal would act on escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shortened(word: str) -> str:
    """Return a word, cut to the length that a message has room for."""
    return word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."


def nearest(word: str, legal: Sequence[str]) -> str | None:
    """Return the legal word that is most similar to a word, or None if none is similar."""
    near = difflib.get_close_matches(shortened(word).lower(), legal, n=1)
    return near[0] if near else None


def one_of(legal: Sequence[str]) -> str:
    """Return the legal words as a phrase."""
    return legal[0] if len(legal) == 1 else f"one of {', '.join(legal)}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 module", "2 modules"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
