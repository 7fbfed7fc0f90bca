"""Names, settings and files on pages are those of the code, every page can be found, and prose is plain English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import normforge

from .shell import PAGES, ROOT, doc, first_sentence, links, prose

FOLDERS = (
    *("codegen", "templates", "runtime", "tools", "tests", "proving"),
    *("benchmarks", "docs", "examples", "manifests", "generated"),
)
# Made by what the text tells to do.
MADE = {"needed.yaml", "mine.yaml", "sm_80.yaml", "serve.py"}


def settings(*paths: Path) -> set[str]:
    return {name for path in paths for name in re.findall(r"\bNORMFORGE_[A-Z_]+\b", path.read_text())}


def test_every_setting_is_listed() -> None:
    read = settings(*(path for folder in ("runtime", "codegen") for path in (ROOT / folder).rglob("*.py")))
    assert {*re.findall(r"^\| `(NORMFORGE_[A-Z_]+)` \|", doc("deploy").read_text(), re.MULTILINE)} == read
    assert settings(*PAGES) <= read | settings(*(ROOT / "tests").rglob("*.py"))


def test_every_public_name_is_listed() -> None:
    rows = re.findall(r"^\| (`.*?) \|", doc("names").read_text().partition("## Arguments")[0], re.MULTILINE)
    # Classes of results, and the version, are no functions.
    others = {"ColumnwiseOutput", "LayerNormOutput", "Patch", "TorchOverride", "__version__"}
    others |= {"QuantisedGradients", "QuantisedOutput"}
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*normforge.__all__} - others
    api = [page.read_text() for page in (ROOT / "docs" / "reference" / "api").glob("*.md")]
    shown = [name for text in api for name in re.findall(r"^::: normforge\.(\w+)$", text, re.MULTILINE)]
    assert sorted(shown) == sorted({*normforge.__all__, "jax"} - {"__version__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page: Path) -> None:
    named = re.findall(r"`([\w/.-]+\.(?:py|j2|yaml|csv|txt|md))`", prose(page))
    there = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    there += [f"/{path.name}" for path in ROOT.iterdir()]
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in there)]
    # A module of generated/ may be one that the page's manifest makes.
    assert [name for name in missing if Path(name).name not in MADE and not name.startswith("generated/")] == []


def test_the_map_is_the_packages() -> None:
    listed = re.findall(r"^(\w+)/ {2,}\S", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    packages = [path.parent.name for path in (ROOT / "runtime").glob("*/__init__.py")]
    assert sorted(listed) == sorted([*packages, "tools"])


def test_every_page_can_be_reached_from_the_readme() -> None:
    found, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        found.add(page)
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links(page) if "://" not in link}
        ahead += [target for target in targets if target.suffix == ".md" and target not in found]
    assert set(PAGES) <= found


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent != ROOT], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_first_what_it_answers(page: Path) -> None:
    sentence = first_sentence(page)
    assert re.fullmatch(r"[A-Z].*[.:]", sentence)
    assert len(sentence.split()) <= 30


def test_the_front_door_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


# Ruff's D401 checks functions. These openings are checked in classes, modules, properties and comments as well.
OPENING = re.compile(r"(What|Whether|Of|So|Where|Likewise|The same|That|Those|As)\b")

# Words that a reader has to translate first, with the words to use.
WORDS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text())
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
