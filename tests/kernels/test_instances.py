"""Every instance of the loaded table, at awkward shapes, against the fp64 oracle."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.values import DType, Pipeline
from normforge.selection import dispatch
from normforge.selection.table import Entry, RetiledTable

from ..calling import each_device
from ..folders import distinct_tiles
from ..thorough import first_of_each
from .problems import Problem, mixed_dtypes

# A table grows while tests run: what they call that it lacks is added.
mode_of = cache(Mode.from_name)

# A bucket without a cap is tried at a prime that is no multiple of anything.
LONG_PRIME = 140009


def problems(entry: Entry, tile: Tile) -> list[Problem]:
    """Both edges of the bucket and an odd length between; one row, several, and rows with a stride of their own.

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
        Problem(mode, 1, first, dtypes=dtypes[0], absent=lacks[0]),
        Problem(mode, several, last, dtypes=dtypes[1], absent=lacks[1]),
        Problem(mode, 5 if mode.is_backward else 3, middle, middle + 7, dtypes[2], lacks[2]),
    ]


_PROBLEMS = 3


def turns(entry: Entry, device: str) -> list[tuple[int, Tile]]:
    """Each problem with one of the entry's tiles at least, and each tile with one of the problems at least."""
    # In the interpreter programs run one after another, and cannot wait for each other.
    tiles = [tile for tile in distinct_tiles(entry) if device == "cuda" or tile.pipeline is not Pipeline.SPREAD]
    return [(turn % _PROBLEMS, tiles[turn % len(tiles)]) for turn in range(max(_PROBLEMS, len(tiles)))]


@dataclass(frozen=True)
class Share:
    """One of an instance's turns, or all the others.

    Attributes:
        entry: the instance.
        place: among the table's; neighbours begin with different turns.
        is_first: which of the two.
    """

    entry: Entry
    place: int
    is_first: bool

    @property
    def name(self) -> str:
        """The instance's name, and whether this is the rest."""
        return self.entry.name if self.is_first else f"{self.entry.name}-rest"

    @property
    def kind(self) -> Hashable:
        """What the first of stands for the others: one turn of each instance, of long rows of one for each pipeline."""
        if not self.is_first:
            return None
        if self.entry.first <= _LONGEST_QUICK:
            return self.entry.name
        return mode_of(self.entry.mode).direction, frozenset(tile.pipeline for tile in distinct_tiles(self.entry))

    def turns(self, device: str) -> list[tuple[int, Tile]]:
        """Which problem with which tile, in order."""
        every = turns(self.entry, device)
        first = self.place % len(every)
        if self.is_first:
            return [every[first]]
        rest = every[first + 1 :] + every[:first]
        return rest[:1] if device == "cpu" and self.entry.first > _LONGEST_INTERPRETED else rest


# The interpreter takes up to a hundredth of a second for such a row.
_LONGEST_QUICK = 1024
# Longer rows take the same kernels in as many tenths of a second: two turns of each instance, and a card runs all.
_LONGEST_INTERPRETED = 16384


def shares(*, backward: bool) -> list[Any]:
    """Each instance of a direction, in two shares."""
    entries = enumerate(entry for entry in dispatch.loaded() if mode_of(entry.mode).is_backward is backward)
    both = [Share(entry, place, is_first) for place, entry in entries for is_first in (True, False)]
    return first_of_each(both, lambda share: share.kind, lambda share: share.name)


def check(share: Share, device: str) -> None:
    for index, tile in share.turns(device):
        with dispatch.using(RetiledTable(dispatch.loaded(), share.entry, tile)):
            assert problems(share.entry, tile)[index].check(device) in (share.entry.name, "")


@each_device
@pytest.mark.parametrize("share", shares(backward=False))
def test_instance(share: Share, device: str) -> None:
    check(share, device)


@each_device
@pytest.mark.parametrize("share", shares(backward=True))
def test_gradient_instance(share: Share, device: str) -> None:
    check(share, device)


def test_shares_have_every_turn_once() -> None:
    for direction in (False, True):
        for parameter in shares(backward=direction):
            (share,) = parameter.values
            other = replace(share, is_first=not share.is_first)
            assert sorted(share.turns("cuda") + other.turns("cuda"), key=str) == sorted(
                turns(share.entry, "cuda"), key=str
            )
