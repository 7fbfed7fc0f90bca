"""Docstrings and comments in plain English: each opens with its subject or a verb, and uses the field's words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .pages import ROOT, doc

# Ruff's D401 checks functions. These openings are checked in classes, modules, properties and comments as well.
OPENING = re.compile(r"(What|Whether|Of|So|Where|Likewise|The same|That|Those|As)\b")

# Words that a reader has to translate first, with the words to use.
WORDS = {
    r"likewise": "the sentence again, or 'in the same way'",
    r"lies? apart": "is strided",
    r"speed of memory": "memory bandwidth",
    r"by hand besides": "a sentence that says what is written by hand",
    r"what of it|the same of": "the noun",
    r"stands? for": "means",
    r"in turn with": "alternates with",
    r"(?:is|are) told": "takes, or knows",
    r"held against": "compared with",
    r"a row of scales": "scales per row",
    r"nobody|somebody": "the name of who",
}
WORD = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)


def docstrings(text: str) -> Iterator[str]:
    """Yield every docstring of a Python text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def comments(text: str) -> Iterator[str]:
    """Yield the comments of a Python text: adjacent lines as one, and each comment behind code."""
    for block in re.findall(r"(?:^ *#.*\n)+", text, re.MULTILINE):
        yield " ".join(line.strip(" #") for line in block.splitlines())
    yield from re.findall(r"\S  # (.*)$", text, re.MULTILINE)


def dialect(text: str) -> list[str]:
    """Return what is to be mended in a Python text: openings, and sentences with a word of `WORDS`."""
    prose = [*docstrings(text), *comments(text)]
    opened = [each.partition("\n")[0] for each in prose if OPENING.match(each)]
    return opened + [each[: found.end()].rpartition("\n")[2] for each in prose for found in WORD.finditer(each)]


def test_docstrings_and_comments_are_plain() -> None:
    folders = ("runtime", "codegen", "tools", "benchmarks", "examples")
    paths = [ROOT / "generate.py", *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    found = {path: dialect(path.read_text()) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


# Words of all of docs/, and of pages that once held whole tables.
MOST_WORDS = 35_000
MOST_WORDS_OF = {"benchmarks": 1_200, "design": 2_900, "h100": 500, "models": 1_000}


def words(path: Path) -> int:
    """Return the number of words of a page, as `wc -w` counts them."""
    return len(path.read_text().split())


def test_pages_are_short() -> None:
    assert sum(words(path) for path in (ROOT / "docs").rglob("*.md")) <= MOST_WORDS
    assert {name: count for name in MOST_WORDS_OF if (count := words(doc(name))) > MOST_WORDS_OF[name]} == {}
