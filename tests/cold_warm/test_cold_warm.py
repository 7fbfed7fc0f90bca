"""A call does what it would do in a new process, whatever ran before: random sequences, launches recorded, not run."""

from __future__ import annotations

import os
import sys

import pytest

from proving.cold_warm.compare import FAMILIES, run, subjects

from ..properties import seed
from ..thorough import COSTLY, THOROUGH

pytestmark = pytest.mark.usefixtures("random_calls")

# Calls that are compared.
FEW = dict.fromkeys(FAMILIES, 60) | {"functional": 120, "parallel": 10}
MANY = dict.fromkeys(FAMILIES, 500) | {"functional": 900, "gated": 1000, "group": 1000}
MANY |= {"parallel": 150}

# Those of which no kernel is launched have one way. Few calls of the other families go by tensors.
WAYS = [
    pytest.param(
        *(family, by_address),
        id=f"{family}-by_{'address' if by_address else 'tensor'}",
        marks=() if by_address or family in ("functional", "parallel") else THOROUGH,
    )
    for family in FAMILIES
    for by_address in (False, True)
    if not (by_address and family == "parallel")
]
each_way = pytest.mark.parametrize(("family", "by_address"), WAYS)


def hold(family: str, count: int, *, by_address: bool) -> None:
    drawn = int(seed.settled())
    print(f"python -m proving cold_warm --family {family} --seed {drawn}")
    served, differences = run(family, drawn, count, by_address=by_address)
    assert not differences, "\n\n".join(map(str, differences))
    assert served > count / 4


@COSTLY
@each_way
def test_calls_do_what_they_do_in_a_new_process(family: str, by_address: bool) -> None:
    hold(family, FEW[family], by_address=by_address)


@THOROUGH
@each_way
def test_many_calls_do_what_they_do_in_a_new_process(family: str, by_address: bool) -> None:
    hold(family, MANY[family], by_address=by_address)


# Dictionaries that grow and depend on no call: registries, tables of instances, and code that was read from a folder.
_NO_CACHES = frozenset(
    (
        "normforge.operators.registered._kernels",
        "normforge.operators.registered._at_once",
        "normforge.kernels.obtain._compiled",
    )
)


@THOROUGH
def test_no_cache_is_left_out() -> None:
    """Every dictionary of a module that calls make longer is listed as none that depends on calls."""

    def lengths() -> dict[str, int]:
        modules = [(name, module) for name, module in list(sys.modules.items()) if name.startswith("normforge.")]
        return {
            f"{name}.{word}": len(value)
            for name, module in modules
            for word, value in list(vars(module).items())
            if isinstance(value, dict) and word.startswith("_") and not word.startswith("__")
        }

    families = ("functional", "forward", "gated", "group", "heads", "several")
    # Registries grow as families are imported.
    for family in families:
        subjects(family)
    before = lengths()
    for family in families:
        run(family, 0, 12, by_address=False)
    grown = {name for name, length in lengths().items() if length > before.get(name, length)}
    assert not grown - _NO_CACHES, os.linesep.join(sorted(grown))
