"""manifests/full.yaml is every legal combination, with Mode itself as the judge of what is legal."""

from __future__ import annotations

from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from normforge.codegen.errors import IllegalCombinationError
from normforge.codegen.groups import group_modes
from normforge.codegen.legal import legal_modes
from normforge.codegen.manifest import load
from normforge.codegen.model import Mode
from normforge.codegen.tiling import standard_ladder

from ..thorough import THOROUGH


@pytest.mark.parametrize(("first", "step"), [(0, 127), pytest.param(1, 7, marks=THOROUGH)])
def test_what_is_legal_beside_a_legal_mode_is_listed(first: int, step: int) -> None:
    """Modes that differ from a listed one in a single axis: of those that are listed, one in so many."""
    modes, types = tuple(legal_modes()), get_type_hints(Mode)
    listed = set(modes)
    assert len(listed) == len(modes)
    axes = [(False, True) if types[field.name] is bool else tuple(types[field.name]) for field in fields(Mode)]

    def is_legal(values: tuple[Any, ...]) -> bool:
        try:
            Mode(*values)
        except IllegalCombinationError:
            return False
        return True

    for mode in modes[first::step]:
        values = astuple(mode)
        for place, options in enumerate(axes):
            for other in options:
                changed = (*values[:place], other, *values[place + 1 :])
                assert not is_legal(changed) or Mode(*changed) in listed, changed


@THOROUGH
def test_full_holds_every_legal_mode_over_every_bucket(repository: Path) -> None:
    manifest = load(repository / "manifests" / "full.yaml")
    modes = [*legal_modes(), *group_modes()]
    expected = {(mode, bucket) for mode in modes for bucket in standard_ladder()}
    assert {(instance.mode, instance.bucket) for instance in manifest.instances} == expected
    assert len(manifest.instances) == len(expected)
