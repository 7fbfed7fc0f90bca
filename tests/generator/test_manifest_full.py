"""manifests/full.yaml is every legal combination, with Mode itself as the judge of what is legal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from normforge.codegen.errors import IllegalCombinationError
from normforge.codegen.manifest import load
from normforge.codegen.model import Cast, Direction, DType, FusedAdd, FusedQuant, Mode, Norm, Rounding
from normforge.codegen.tiling import standard_ladder

BOOLEANS = (False, True)


def every_legal_mode() -> Iterator[Mode]:
    axes_of_modes: tuple[Iterable[Any], ...] = (Norm, DType, DType, FusedAdd, FusedQuant, BOOLEANS, BOOLEANS, DType)
    for axes in product(*axes_of_modes, Rounding, Direction, Cast):
        try:
            yield Mode(*axes)
        except IllegalCombinationError:
            continue


def test_full_holds_every_legal_mode_over_every_bucket(repository: Path) -> None:
    manifest = load(repository / "manifests" / "full.yaml")
    expected = {(mode, bucket) for mode in every_legal_mode() for bucket in standard_ladder()}
    assert {(instance.mode, instance.bucket) for instance in manifest.instances} == expected
    assert len(manifest.instances) == len(expected)


def test_names_in_full_are_unique(repository: Path) -> None:
    manifest = load(repository / "manifests" / "full.yaml")
    names = {instance.name for instance in manifest.instances}
    assert len(names) == len(manifest.instances)
    modes = {instance.mode for instance in manifest.instances}
    assert len({mode.name for mode in modes}) == len(modes)
