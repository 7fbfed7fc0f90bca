"""`docs/explanation/derivations.md` has the numbers that its script computes, and pictures that it draws."""

from __future__ import annotations

import importlib.util
import math
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ..thorough import THOROUGH
from .pages import ROOT, doc, links

PAGE = doc("derivations")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("derivations")


@pytest.mark.parametrize("name", ["variances", "sums"])
def test_tables_are_what_the_script_computes(script: ModuleType, name: str) -> None:
    between = PAGE.read_text().partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0]
    assert between.strip() == script.TABLES[name]()


def test_a_pivot_alone_keeps_rows_far_from_zero(script: ModuleType) -> None:
    ways = (script.by_squares, script.by_mean, script.by_pivot)
    by_squares, by_mean, by_pivot = (script.errors(way, 256) for way in ways)
    assert max(by_pivot) < 2e-6
    assert by_mean[5] > 1e-3
    assert math.isnan(by_squares[6])


def test_welford_is_right_where_rounding_is_small(script: ModuleType) -> None:
    x = np.random.default_rng(1).standard_normal((3, 64))
    np.testing.assert_allclose(script.by_welford(x), script.by_pivot(x), atol=1e-5)


def test_models_of_programs_take_every_row_once_and_hold_a_lock_alone(script: ModuleType) -> None:
    locked, kept = script.with_locks(), script.with_partial_sums()
    for spans in (locked, kept):
        assert sum(span.what == "row" for span in spans) == script.TOTAL_ROWS
        for program in range(script.SLOTS):
            own = sorted((span.start, span.start + span.length) for span in spans if span.program == program)
            assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(own))
    adding = sorted(span.start for span in locked if span.what == "add")
    assert len(adding) == script.TOTAL_ROWS
    # No more additions at a time than there are locks.
    behind = zip(adding, adding[script.LOCKS :], strict=False)
    assert all(later - earlier >= script.ADD_TIME - 1e-9 for earlier, later in behind)


@THOROUGH
def test_the_pictures_of_the_page_are_drawn(script: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    script.main(["--into", str(page)])
    pictures = load("derivation_pictures")
    pictures.main([str(tmp_path)])
    assert page.read_text() == PAGE.read_text()
    shown = {Path(link).name for link in links(PAGE) if link.endswith(".png")}
    assert shown == {path.name for path in tmp_path.glob("*.png")} == {f"{name}.png" for name in pictures.PICTURES}


def test_a_page_without_markers_is_left_alone(script: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="lacks the markers of variances"):
        script.put_into(page)
    assert page.read_text() == "nothing"
