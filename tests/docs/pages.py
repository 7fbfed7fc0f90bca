"""Markdown, as far as the tests of the documents read it: code blocks and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

PAGES = tuple(sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]))


def doc(name: str) -> Path:
    """Return the page of docs/ that has this name, whichever folder it is in."""
    (page,) = (ROOT / "docs").rglob(f"{name}.md")
    return page


@dataclass(frozen=True)
class Block:
    """A fenced piece of code.

    Attributes:
        page: the file.
        line: of the page, where its first line stands.
        language: the word behind the fence.
        text: what is between the fences, its indentation in a list taken off.
    """

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line} ({self.language})"


_FENCED = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[(?:[^\]]|\n)*?\]\(([^)\s]+)\)")


def blocks(page: Path) -> list[Block]:
    """Return a page's code blocks, in order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 2, found["language"], _dedented(found))
        for found in _FENCED.finditer(text)
    ]


def _dedented(found: re.Match[str]) -> str:
    return re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE)


def prose(page: Path) -> str:
    """Return a page's text without its code blocks."""
    return _FENCED.sub("", page.read_text())


def links(page: Path) -> Iterator[str]:
    """Yield the targets of a page's links and pictures."""
    yield from _LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page)))


def first_sentence(page: Path) -> str:
    """Return the first sentence below a page's title."""
    below = prose(page).partition("\n")[2].strip()
    return re.split(r"(?<=[.:])\s", below.replace("\n", " "), maxsplit=1)[0]
