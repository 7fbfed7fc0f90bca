"""`docs/explanation/derivations.md` has the numbers that its script computes, and pictures that it draws."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import section

from ..test_examples import example
from ..thorough import THOROUGH
from .pages import ROOT, doc, links

PAGE = doc("derivations")


@pytest.fixture(scope="module")
def script() -> Any:
    return example(ROOT, "derivations")


@pytest.mark.parametrize("name", ["variances", "sums"])
def test_tables_are_what_the_script_computes(script: Any, name: str) -> None:
    assert section(PAGE, name) == script.TABLES[name]()


def test_a_pivot_alone_keeps_rows_far_from_zero(script: Any) -> None:
    ways = (script.by_squares, script.by_mean, script.by_pivot)
    by_squares, by_mean, by_pivot = (script.errors(way, 256) for way in ways)
    assert max(by_pivot) < 2e-6
    assert by_mean[5] > 1e-3
    assert math.isnan(by_squares[6])


@THOROUGH
def test_the_pictures_of_the_page_are_drawn(script: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    script.main(["--into", str(page)])
    pictures = example(ROOT, "derivation_pictures")
    pictures.main([str(tmp_path)])
    assert page.read_text() == PAGE.read_text()
    shown = {Path(link).name for link in links(PAGE) if link.endswith(".png")}
    assert shown == {path.name for path in tmp_path.glob("*.png")} == {f"{name}.png" for name in pictures.PICTURES}
