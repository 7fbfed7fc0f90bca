"""The design notes' table of families has a true entry in every field."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import torch

from normforge.calls import native

from .pages import doc

FAMILIES = ("plain", "dropout", "modulated", "gated", "quantised", "GroupNorm")
# The look-ups in C that each family's forward and backward calls have.
LOOKUPS = {
    "plain": ("recorded", "gradients"),
    "dropout": ("dropped", "dropped_gradients"),
    "modulated": ("modulated", "modulated_gradients"),
    "gated": ("gated", "gated_gradients"),
    "quantised": ("quantised", "quantised_gradients"),
    "GroupNorm": ("group", "group_gradients"),
}


def table() -> dict[str, dict[str, str]]:
    """Return the page's table, by ability and family."""
    section = doc("design").read_text().partition("## What each family has")[2]
    lines = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert tuple(re.findall(r"\| ([\w]+)(?= )", section.partition("\n|---")[0])) == FAMILIES
    return {ability: dict(zip(FAMILIES, cells, strict=True)) for ability, *cells in rows if ability}


def test_every_field_is_filled() -> None:
    found = table()
    assert len(found) >= 11
    for ability, cells in found.items():
        assert all(cells.values()), ability
        assert {family for family, cell in cells.items() if cell == "–"} <= {"quantised"}, ability


def test_known_calls_are_looked_up_where_the_table_says() -> None:
    found = table()
    for family, names in LOOKUPS.items():
        for name, ability in zip(names, ("known forward calls", "known backward calls"), strict=True):
            assert hasattr(native.calls, name) == found[ability][family].startswith("C"), (family, ability)


def test_operators_are_those_that_the_table_names() -> None:
    names = [name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("normforge")]
    patterns = {cell.strip("`") for cell in table()["operators"].values()}
    assert all(any(fnmatch(name, pattern) for name in names) for pattern in patterns)
    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)] == []
