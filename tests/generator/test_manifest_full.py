"""manifests/full.yaml is every legal combination, with Mode itself as the judge of what is legal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import get_type_hints

from normforge.codegen.errors import IllegalCombinationError
from normforge.codegen.groups import group_modes
from normforge.codegen.manifest import load
from normforge.codegen.model import Mode, legal_modes
from normforge.codegen.tiling import standard_ladder


def every_legal_mode() -> Iterator[Mode]:
    """Whatever the fields of `Mode` may hold, tried."""
    types = get_type_hints(Mode)
    axes = [(False, True) if types[field.name] is bool else tuple(types[field.name]) for field in fields(Mode)]
    for values in product(*axes):
        with suppress(IllegalCombinationError):
            yield Mode(*values)


def test_legal_modes_are_every_mode_that_can_be_made() -> None:
    assert list(legal_modes()) == list(every_legal_mode())


def test_full_holds_every_legal_mode_over_every_bucket(repository: Path) -> None:
    manifest = load(repository / "manifests" / "full.yaml")
    modes = [*every_legal_mode(), *group_modes()]
    expected = {(mode, bucket) for mode in modes for bucket in standard_ladder()}
    assert {(instance.mode, instance.bucket) for instance in manifest.instances} == expected
    assert len(manifest.instances) == len(expected)


def test_names_in_full_are_unique(repository: Path) -> None:
    manifest = load(repository / "manifests" / "full.yaml")
    names = {instance.name for instance in manifest.instances}
    assert len(names) == len(manifest.instances)
    modes = {instance.mode for instance in manifest.instances}
    assert len({mode.name for mode in modes}) == len(modes)
