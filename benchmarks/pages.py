"""Sections of a page that a command writes, each between two markers."""

from __future__ import annotations

from pathlib import Path

from .errors import UsageError


def markers(what: str) -> tuple[str, str]:
    """Return the two lines of a page that a section stands between."""
    return f"<!-- {what}: begin -->", f"<!-- {what}: end -->"


def section(page: Path, what: str) -> str:
    """Return the text between a page's two markers.

    Raises:
        UsageError: the page lacks a marker.
    """
    return _parts(page, what)[1].strip()


def put_into(page: Path, text: str, what: str) -> None:
    """Replace the text between a page's two markers.

    Raises:
        UsageError: the page lacks a marker.
    """
    before, _, after = _parts(page, what)
    page.write_text(f"{before}\n\n{text}\n\n{after}")


def _parts(page: Path, what: str) -> tuple[str, str, str]:
    first, last = markers(what)
    before, begin, rest = page.read_text().partition(first)
    between, end, after = rest.partition(last)
    if not begin or not end:
        raise UsageError(f"{page} lacks the markers {first} and {last}; put each on a line, where the tables belong")
    return before + begin, between, end + after
