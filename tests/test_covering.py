"""A covering array has every combination that its space has, whatever the space leaves out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import product

import pytest

from normforge.codegen.axes import ROW_AXES
from normforge.codegen.model import Mode

from .covering import axes_of, covering, every_mode, uncovered


def test_each_axis_is_a_column() -> None:
    assert {field.name for field in fields(Mode)} == {axis.name for axis in ROW_AXES}
    assert len(axes_of(every_mode()[0])) == len(ROW_AXES)


@pytest.mark.parametrize(
    "is_legal",
    [
        lambda row: True,
        # Rules of two, of three and of four columns, and one by which a column has a single partner.
        lambda row: row[0] != row[1],
        lambda row: (row[0] + row[1] + row[2]) % 3 != 0,
        lambda row: sum(row[:4]) % 2 == 0,
        lambda row: row[4] == 0 or (row[0], row[1]) == (2, 1),
    ],
    ids=["all", "two", "three", "four", "one_partner"],
)
@pytest.mark.parametrize("strength", [2, 3])
def test_rules_of_any_number_of_columns(is_legal: Callable[[tuple[int, ...]], bool], strength: int) -> None:
    space = [row for row in product(range(3), range(3), range(3), range(2), range(2)) if is_legal(row)]
    array = covering(space, lambda row: row, strength)
    assert set(array) <= set(space)
    assert uncovered(space, lambda row: row, array, strength) == []
