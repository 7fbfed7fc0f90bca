"""manifests/full.yaml is every legal combination, with Mode itself as the judge of what is legal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import Any, get_type_hints

from normforge.codegen.errors import IllegalCombinationError
from normforge.codegen.groups import group_modes
from normforge.codegen.manifest import load
from normforge.codegen.model import Mode, legal_modes
from normforge.codegen.tiling import standard_ladder

from ..thorough import THOROUGH

# The axes that say what stands beside a norm; all of them together take two minutes.
BESIDE = ("modulated", "x_gate", "gating", "gate_activation", "grouped", "dropout")


def made(values: tuple[Any, ...]) -> list[Mode]:
    """The mode, if it is legal."""
    try:
        return [Mode(*values)]
    except IllegalCombinationError:
        return []


def every_legal_mode(step: int) -> Iterator[Mode]:
    """Whatever the fields of `Mode` may hold, tried: beside a norm that is illegal alone, once in so many."""
    types = get_type_hints(Mode)
    axes = {
        field.name: (False, True) if types[field.name] is bool else tuple(types[field.name]) for field in fields(Mode)
    }
    others = [values for name, values in axes.items() if name not in BESIDE]
    beside = [values for name, values in axes.items() if name in BESIDE]
    assert tuple(axes)[-len(beside) :] == BESIDE
    illegal = count()
    for values in product(*others):
        alone = made(values)
        if alone or next(illegal) % step == 0:
            for further in product(*beside):
                yield from made((*values, *further))


@cache
def most_legal_modes() -> tuple[Mode, ...]:
    return tuple(every_legal_mode(step=61))


def test_legal_modes_are_every_mode_that_can_be_made() -> None:
    assert tuple(legal_modes()) == most_legal_modes()


@THOROUGH
def test_nothing_is_legal_beside_a_norm_that_is_not() -> None:
    assert tuple(legal_modes()) == tuple(every_legal_mode(step=1))


def test_full_holds_every_legal_mode_over_every_bucket(repository: Path) -> None:
    manifest = load(repository / "manifests" / "full.yaml")
    modes = [*most_legal_modes(), *group_modes()]
    expected = {(mode, bucket) for mode in modes for bucket in standard_ladder()}
    assert {(instance.mode, instance.bucket) for instance in manifest.instances} == expected
    assert len(manifest.instances) == len(expected)


def test_names_in_full_are_unique(repository: Path) -> None:
    manifest = load(repository / "manifests" / "full.yaml")
    names = {instance.name for instance in manifest.instances}
    assert len(names) == len(manifest.instances)
    modes = {instance.mode for instance in manifest.instances}
    assert len({mode.name for mode in modes}) == len(modes)
