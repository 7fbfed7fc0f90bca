"""manifests/full.yaml is every legal combination, with Mode itself as the judge of what is legal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, fields
from itertools import count, product
from pathlib import Path
from typing import Any, get_type_hints

from normforge.codegen.errors import IllegalCombinationError
from normforge.codegen.groups import group_modes
from normforge.codegen.legal import legal_modes
from normforge.codegen.manifest import load
from normforge.codegen.model import Mode
from normforge.codegen.tiling import standard_ladder
from normforge.codegen.values import DType

from ..thorough import THOROUGH

# The axes that say what stands beside a norm, and what engines ask of a quantised one. Beside what is legal alone each
# is tried whole, with the other's defaults, and both together with one mode in so many; beside one in so many that is
# not, each value of either by itself.
BESIDE = ("modulated", "x_gate", "gating", "gate_activation", "grouped", "dropout")
SERVED = ("group_size", "scale_format", "scale_layout", "scale_ub", "quantise_rounded", "save_unquant")
TOGETHER = 389
ALONE = 11


def made(values: tuple[Any, ...]) -> list[Mode]:
    """The mode, if it is legal."""
    try:
        return [Mode(*values)]
    except IllegalCombinationError:
        return []


def axes() -> dict[str, tuple[Any, ...]]:
    """What each field of `Mode` may hold."""
    types = get_type_hints(Mode)
    return {
        field.name: (False, True) if types[field.name] is bool else tuple(types[field.name]) for field in fields(Mode)
    }


def every_legal_mode() -> Iterator[Mode]:
    """Whatever the fields of `Mode` may hold, tried."""
    every = axes()
    others = [values for name, values in every.items() if name not in (*BESIDE, *SERVED)]
    beside, served = ([every[name] for name in names] for names in (BESIDE, SERVED))
    assert tuple(every)[-len((*BESIDE, *SERVED)) :] == (*BESIDE, *SERVED)
    plain = tuple(options[0] for options in (*beside, *served))
    apart = [
        *[(*values, *plain[len(beside) :]) for values in product(*beside)],
        *[(*plain[: len(beside)], *values) for values in product(*served)][1:],
    ]
    singly = [
        (*plain[:place], other, *plain[place + 1 :])
        for place, options in enumerate((*beside, *served))
        for other in options[1:]
    ]
    legal, illegal = count(), count()
    for values in product(*others):
        further: Iterable[tuple[Any, ...]] = singly if next(illegal) % ALONE == 0 else ()
        # What is fp4 has no plain form, and is tried as one fp8 is.
        alike = (*values[:2], DType.FP8_E4M3FN, *values[3:]) if values[2] is DType.FP4_E2M1FN else values
        if made((*alike, *plain)):
            further = product(*beside, *served) if next(legal) % TOGETHER == 0 else apart
        for beside_it in further:
            yield from made((*values, *beside_it))


def test_what_is_legal_beside_a_legal_mode_is_listed() -> None:
    """Modes that differ from a listed one in a single axis: of those that are listed, one in so many."""
    modes, every = tuple(legal_modes()), axes()
    listed = set(modes)
    assert len(listed) == len(modes)
    for mode in modes[::37]:
        values = astuple(mode)
        for place, options in enumerate(every.values()):
            for other in options:
                assert set(made((*values[:place], other, *values[place + 1 :]))) <= listed


@THOROUGH
def test_legal_modes_are_every_mode_that_can_be_made() -> None:
    assert set(legal_modes()) == set(every_legal_mode())


@THOROUGH
def test_full_holds_every_legal_mode_over_every_bucket(repository: Path) -> None:
    manifest = load(repository / "manifests" / "full.yaml")
    modes = [*legal_modes(), *group_modes()]
    expected = {(mode, bucket) for mode in modes for bucket in standard_ladder()}
    assert {(instance.mode, instance.bucket) for instance in manifest.instances} == expected
    assert len(manifest.instances) == len(expected)


@THOROUGH
def test_names_in_full_are_unique(repository: Path) -> None:
    manifest = load(repository / "manifests" / "full.yaml")
    names = {instance.name for instance in manifest.instances}
    assert len(names) == len(manifest.instances)
    modes = {instance.mode for instance in manifest.instances}
    assert len({mode.name for mode in modes}) == len(modes)
