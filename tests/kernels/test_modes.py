"""Modes that the table lacks too, in each pipeline, against the fp64 oracle: any two of an array, any three with time.

A mode that is not in the table is generated on demand, as a call's would be.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.values import Part, Pipeline
from normforge.selection import dispatch
from normforge.selection.table import RetiledTable

from ..covering import axes_of, covering, every_mode, parametrize
from .compile_cases import parts_of
from .problems import Problem, mixed_dtypes

# For each kernel a row of a few chunks, the last of them ragged, and the tile that takes it so. Rows of odd length
# start anywhere; row_terms runs ahead of two_pass.
CALLS: dict[Pipeline | Part, tuple[int, Tile]] = {
    Pipeline.ROWS: (100, Tile(Pipeline.ROWS, 4, 128, 1)),
    Pipeline.ONE_PASS: (600, Tile(Pipeline.ONE_PASS, 1, 256, 1)),
    Pipeline.TWO_PASS: (600, Tile(Pipeline.TWO_PASS, 1, 256, 1)),
    Part.WINDOW: (601, Tile(Pipeline.ONE_PASS, 1, 256, 1)),
}

# Backward, two_pass takes several rows at a time, and no table may have it otherwise.
BACKWARD_ROWS = {Pipeline.TWO_PASS: 2}


Case = tuple[Mode, Pipeline | Part]


def columns(case: Case) -> tuple[Any, ...]:
    mode, part = case
    return (*axes_of(mode), part)


@cache
def every_case() -> tuple[Case, ...]:
    """In the interpreter programs cannot wait for one another, so that `spread` is left out."""
    return tuple((mode, part) for mode in every_mode() for part in parts_of(mode) if part in CALLS)


@cache
def array(strength: int) -> tuple[Case, ...]:
    return tuple(covering(every_case(), columns, strength))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the arrays to the test that runs them."""
    if "case" in metafunc.fixturenames:
        parametrize(metafunc, "case", lambda: array(2), lambda: array(3), lambda case: case[0].kernel(case[1]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_mode(case: Case, device: str) -> None:
    mode, part = case
    n, tile = CALLS[part]
    if mode.is_backward:
        tile = replace(tile, rows=BACKWARD_ROWS.get(tile.pipeline, tile.rows))
    entry = dispatch.find(mode, n)
    problem = Problem(mode, 2 * tile.rows + 1, n, dtypes=mixed_dtypes(mode, len(mode.name)))
    with dispatch.using(RetiledTable(dispatch.loaded(), entry, tile)):
        problem.check(device)
