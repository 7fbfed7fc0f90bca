"""The pages that commands write are summaries of the tables that the commands wrote, and as short as a summary."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.pages import section
from proving.accuracy import report as accuracy
from proving.conformance import report as conformance
from proving.evidence import Table, load
from proving.matrix import command as matrix
from proving.models import command as models
from proving.mutants import report as mutants
from proving.sanitizer import command as sanitizer
from proving.soak import report as soak

from .pages import ROOT, doc

SUMMARIES: dict[str, tuple[str, Callable[[Table], str]]] = {
    "accuracy": ("evidence", accuracy.summary),
    "conformance": ("evidence", conformance.summary),
    "sanitizer": ("evidence", sanitizer.summary),
    "soak": ("evidence", soak.summary),
    "mutants": ("evidence", mutants.summary),
    "versions": ("versions", matrix.summary),
    **{name: (name, models.summary) for name in ("huggingface", "diffusers", "timm")},
}
# Words of a section, or of a page with one section.
MOST_WORDS = 500


@pytest.mark.parametrize("what", SUMMARIES)
def test_a_section_is_the_summary_of_its_table(what: str) -> None:
    name, summary = SUMMARIES[what]
    written = section(doc(name), what)
    assert written == summary(load(ROOT, what))
    assert len(written.split()) <= MOST_WORDS


@pytest.mark.parametrize("name", sorted({name for name, _ in SUMMARIES.values()}))
def test_a_page_is_a_screen_per_section(name: str) -> None:
    sections = sum(page == name for page, _ in SUMMARIES.values())
    assert len(doc(name).read_text().split()) <= MOST_WORDS * sections
