"""Every instance of the loaded table, at awkward shapes, against the fp64 oracle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import normforge
from normforge.codegen.model import DType, Mode, Pipeline, Tile, legal_modes
from normforge.selection import dispatch
from normforge.selection.table import Entry, RetiledTable

from .gradients import GradientProblem
from .problems import Problem, mixed_dtypes

MODES = {mode.name: mode for mode in legal_modes()}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# A bucket without a cap is tried at a prime that is no multiple of anything.
LONG_PRIME = 140009


def problems(entry: Entry, rows: int) -> list[Problem]:
    """Both edges of the bucket and an odd length between; one row, several, and rows with a stride of their own."""
    mode: Mode = MODES[entry.mode]
    first, last = entry.first, entry.last or LONG_PRIME
    middle = (first + last) // 2 | 1
    several = (rows + 1,)
    return [
        Problem(mode, (1, first), dtypes=mixed_dtypes(mode, 0), absent=frozenset({"bias"})),
        Problem(mode, (*several, last), dtypes=mixed_dtypes(mode, 1)),
        Problem(mode, (3, middle), row_stride=middle + 7, dtypes=mixed_dtypes(mode, 2), absent=frozenset({"weight"})),
    ]


def gradient_problems(entry: Entry, tile: Tile) -> list[GradientProblem]:
    """The same lengths; more tiles of rows than there are programs in the interpreter, and a row alone."""
    mode: Mode = MODES[entry.mode]
    first, last = entry.first, entry.last or LONG_PRIME
    middle = (first + last) // 2 | 1
    several = (2 if tile.pipeline is Pipeline.TWO_PASS else 4) * tile.rows + 1
    return [
        GradientProblem(mode, (1, first), dtypes=mixed_dtypes(mode, 0), has_weight=False),
        GradientProblem(mode, (several, last), dtypes=mixed_dtypes(mode, 1) | {"dy": DType.BF16}),
        GradientProblem(mode, (5, middle), row_stride=middle + 7, dtypes=mixed_dtypes(mode, 2) | {"dy": DType.FP32}),
    ]


_PROBLEMS = 3


def taking_turns(entry: Entry, device: str) -> Iterator[tuple[int, Tile]]:
    """Each problem with one of the entry's tiles at least, and each tile with one of the problems at least."""
    # In the interpreter programs run one after another, and cannot wait for each other.
    tiles = [tile for tile in entry.distinct_tiles() if device == "cuda" or tile.pipeline is not Pipeline.SPREAD]
    for turn in range(max(_PROBLEMS, len(tiles))):
        yield turn % _PROBLEMS, tiles[turn % len(tiles)]


FORWARD = [entry for entry in normforge.instances() if not MODES[entry.mode].is_backward]
BACKWARD = [entry for entry in normforge.instances() if MODES[entry.mode].is_backward]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entry", FORWARD, ids=lambda entry: entry.name)
def test_instance(entry: Entry, device: str) -> None:
    for index, tile in taking_turns(entry, device):
        problem = problems(entry, tile.rows)[index]
        assert normforge.which(**problem.arguments(device), norm=problem.mode.norm) == entry.name
        with dispatch.using(RetiledTable(dispatch.loaded(), entry, tile)):
            problem.check(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entry", BACKWARD, ids=lambda entry: entry.name)
def test_gradient_instance(entry: Entry, device: str) -> None:
    for index, tile in taking_turns(entry, device):
        with dispatch.using(RetiledTable(dispatch.loaded(), entry, tile)):
            gradient_problems(entry, tile)[index].check(device)
