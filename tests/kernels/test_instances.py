"""Every instance of the loaded table, and modes that it lacks, at awkward shapes, against the fp64 oracle."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.values import DType, Part, Pipeline
from normforge.selection import dispatch
from normforge.selection.table import Entry, RetiledTable

from ..calling import each_device
from ..covering import axes_of, covering, modes_of_one_gpu, parametrize
from ..folders import distinct_tiles
from ..thorough import LONG, first_of_each
from .compile_cases import parts_of
from .problems import Problem, mixed_dtypes

# A table grows while tests run: what they call that it lacks is added.
mode_of = cache(Mode.from_name)

# A bucket without a cap is tried at a prime that is no multiple of anything.
LONG_PRIME = 140009


def problems(entry: Entry, tile: Tile) -> list[Problem]:
    """Both edges of the bucket and an odd length between; one uneven row, several, and rows with a stride of their own.

    Backward there are more tiles of rows than programs in the interpreter.
    """
    mode: Mode = mode_of(entry.mode)
    first, last = entry.first, entry.last or LONG_PRIME
    middle, several = (first + last) // 2 | 1, tile.rows + 1
    lacks: tuple[tuple[str, ...], ...] = (("bias",), (), ("weight",))
    dtypes = [mixed_dtypes(mode, salt) for salt in range(_PROBLEMS)]
    if mode.is_backward:
        several = (2 if tile.pipeline is Pipeline.TWO_PASS else 4) * tile.rows + 1
        lacks = (("weight",), (), ())
        dtypes[1]["dy"], dtypes[2]["dy"] = DType.BF16, DType.FP32
    return [
        Problem(mode, 1, first, dtypes=dtypes[0], absent=lacks[0], uneven=True),
        Problem(mode, several, last, dtypes=dtypes[1], absent=lacks[1]),
        Problem(mode, 5 if mode.is_backward else 3, middle, middle + 7, dtypes[2], lacks[2], True),
    ]


_PROBLEMS = 3


Share = tuple[Entry, int, bool]
# The interpreter takes up to a hundredth of a second for such a row.
_LONGEST_QUICK = 1024
# Longer rows take the same kernels in as many tenths of a second: two turns of each instance, and a card runs all.
_LONGEST_INTERPRETED = 16384


def turns(share: Share, device: str) -> list[tuple[int, Tile]]:
    """Which problem with which tile, in order: one of an instance's turns, or all the others.

    Each problem has one of the tiles at least, and each tile one of the problems; instances side by side in the table
    begin with different turns.
    """
    entry, place, is_first = share
    # In the interpreter programs run one after another, and cannot wait for each other.
    tiles = [tile for tile in distinct_tiles(entry) if device == "cuda" or tile.pipeline is not Pipeline.SPREAD]
    count = max(_PROBLEMS, len(tiles))
    in_order = [(place + turn) % count for turn in range(count)]
    every = [(turn % _PROBLEMS, tiles[turn % len(tiles)]) for turn in in_order]
    if is_first:
        return every[:1]
    return every[1:2] if device == "cpu" and entry.first > _LONGEST_INTERPRETED else every[1:]


def kind(share: Share) -> Hashable:
    """What the first of stands for the others: one turn of each instance, of long rows of one for each pipeline."""
    entry, _, is_first = share
    if not is_first:
        return None
    if entry.first <= _LONGEST_QUICK:
        return entry.name
    return mode_of(entry.mode).direction, frozenset(tile.pipeline for tile in distinct_tiles(entry))


SHARES = first_of_each(
    [
        (entry, place, is_first)
        for backward in (False, True)
        for place, entry in enumerate(each for each in dispatch.loaded() if mode_of(each.mode).is_backward is backward)
        for is_first in (True, False)
    ],
    kind,
    lambda share: share[0].name if share[2] else f"{share[0].name}-rest",
)


@each_device
@pytest.mark.parametrize("share", SHARES)
def test_instance(share: Share, device: str) -> None:
    entry = share[0]
    for index, tile in turns(share, device):
        with dispatch.using(RetiledTable(dispatch.loaded(), entry, tile)):
            assert problems(entry, tile)[index].check(device) in (entry.name, "")


# For each kernel a row of a few chunks, the last of them ragged, and the tile that takes it so. Rows of odd length
# start anywhere; row_terms runs ahead of two_pass.
CALLS: dict[Pipeline | Part, tuple[int, Tile]] = {
    Pipeline.ROWS: (100, Tile(Pipeline.ROWS, 4, 128, 1)),
    Pipeline.ONE_PASS: (600, Tile(Pipeline.ONE_PASS, 1, 256, 1)),
    Pipeline.TWO_PASS: (600, Tile(Pipeline.TWO_PASS, 1, 256, 1)),
    Part.WINDOW: (601, Tile(Pipeline.ONE_PASS, 1, 256, 1)),
    # Longer than a window.
    Part.UNALIGNED: (7171, Tile(Pipeline.TWO_PASS, 1, 256, 1)),
    **dict.fromkeys((Part.COLUMN_AMAX, Part.COLUMNS), (100, Tile(Pipeline.ROWS, 4, 128, 1))),
}

Case = tuple[Mode, Pipeline | Part]


def check(case: Case, device: str) -> None:
    mode, part = case
    n, tile = CALLS[part]
    # It takes several rows at a time then, and no table may have it otherwise.
    if mode.is_backward and part is Pipeline.TWO_PASS:
        tile = replace(tile, rows=2)
    entry = dispatch.find(mode, n)
    problem = Problem(mode, 2 * tile.rows + 1, n, dtypes=mixed_dtypes(mode, len(mode.name)), uneven=True)
    with dispatch.using(RetiledTable(dispatch.loaded(), entry, tile)):
        problem.check(device)


def columns(case: Case) -> tuple[Any, ...]:
    mode, part = case
    return (*axes_of(mode), part)


@cache
def every_case() -> tuple[Case, ...]:
    """In the interpreter programs cannot wait for one another, so that `spread` is left out."""
    return tuple((mode, part) for mode in modes_of_one_gpu() for part in parts_of(mode) if part in CALLS)


@cache
def array(strength: int) -> tuple[Case, ...]:
    return tuple(covering(every_case(), columns, strength))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every triple of values to the test that runs them."""
    if "case" in metafunc.fixturenames:
        parametrize(metafunc, "case", tuple, lambda: array(3), lambda case: case[0].kernel(case[1]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_mode(case: Case, device: str) -> None:
    check(case, device)


@LONG
def test_every_pair_of_values() -> None:
    """In one test, since listing the modes takes longer than running the few that have every pair."""
    for case in array(2):
        check(case, "cpu")
