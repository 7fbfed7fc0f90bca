"""Links between pages lead to files and headings that are there, and every page can be found from the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .pages import PAGES, ROOT, anchors, first_sentence, links

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@each_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


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
