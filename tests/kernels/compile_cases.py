"""Which kernels are compiled for which GPU.

One kernel of each of the table's modes and, where there is time, each kernel for one architecture in turn. Of all legal
modes a covering array: any value of axes, kernels and architectures is compiled somewhere and, where there is time, any
two values together. NORMFORGE_ALL_TARGETS=1 asks for each kernel of each legal mode for each architecture.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import normforge
from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.values import Direction, Part, Pipeline
from normforge.kernels.gpu import Target

from ..covering import axes_of, covering, modes_of_one_gpu
from ..folders import instance
from .compilation import TARGETS

# For each kernel a row length that takes it by rule, and leaves a ragged chunk to mask.
LENGTHS: dict[Pipeline | Part, int] = {
    Pipeline.ROWS: 100,
    # Every row starts at a multiple of 16 bytes.
    Pipeline.ONE_PASS: 1904,
    Part.WINDOW: 1901,
    Part.COLUMNS: 1904,
    Pipeline.TWO_PASS: 20000,
    Part.ROW_TERMS: 20000,
    # Only measured tables take it; these are tiles that an H200 prefers, and the last slice is ragged.
    Pipeline.SPREAD: 70000,
}
SPREAD_TILES = {
    Direction.FORWARD: Tile(Pipeline.SPREAD, rows=1, block=512, warps=2, resident=4, held=8, stages=3),
    Direction.BACKWARD: Tile(Pipeline.SPREAD, rows=4, block=1024, warps=4, resident=3),
}


@dataclass(frozen=True)
class Case:
    """A kernel of a mode, compiled for a target."""

    mode: Mode
    part: Pipeline | Part
    target: Target

    @property
    def name(self) -> str:
        """The kernel's and the architecture's."""
        return f"{self.mode.kernel(self.part)}-{self.target.arch}"

    @property
    def n(self) -> int:
        """How long its rows are."""
        return LENGTHS[self.part]

    @property
    def tile(self) -> Tile:
        """How it runs: as the rule for any architecture says, with many rows."""
        if self.part is Pipeline.SPREAD:
            return SPREAD_TILES[self.mode.direction]
        return instance(self.mode, self.n).tile


def columns(case: Case) -> tuple[Any, ...]:
    """A case as a row of the space that arrays cover."""
    return (*axes_of(case.mode), case.part.name, case.target.arch)


def parts_of(mode: Mode) -> Iterator[Pipeline | Part]:
    """Every kernel of a mode's module."""
    yield from mode.pipelines
    if mode.is_backward:
        yield Part.ROW_TERMS
    if mode.has_window:
        yield Part.WINDOW
    if mode.columnwise.writes:
        yield Part.COLUMNS


@cache
def every_case() -> tuple[Case, ...]:
    """The whole space: each kernel of each legal mode, for each architecture that has it."""
    return tuple(
        Case(mode, part, target)
        for mode in modes_of_one_gpu()
        for part in parts_of(mode)
        for target in TARGETS
        if isinstance(part, Part) or part.runs_on(target.arch)
    )


def of_the_table() -> tuple[Case, ...]:
    """Each kernel of each mode of the loaded table, for each architecture."""
    modes = {entry.mode for entry in normforge.instances()}
    return tuple(case for case in every_case() if case.mode.name in modes)


def in_turn(cases: Sequence[Case], kind: Callable[[Case], Hashable]) -> Iterator[Case]:
    """Yield one case of each kind: the cases of a kind take turns."""
    by_kind: dict[Hashable, list[Case]] = {}
    for case in cases:
        by_kind.setdefault(kind(case), []).append(case)
    for turn, same in enumerate(by_kind.values()):
        yield same[turn % len(same)]


def quick() -> tuple[Case, ...]:
    """What is compiled first: one kernel of each mode of the loaded table among it."""
    return (*covering(every_case(), columns, 1), *in_turn(of_the_table(), lambda case: case.mode))


def thorough() -> tuple[Case, ...]:
    """What is compiled where there is time, what came first among it."""
    if os.environ.get("NORMFORGE_ALL_TARGETS") == "1":
        return every_case()
    return (*covering(every_case(), columns, 2), *in_turn(of_the_table(), lambda case: (case.mode, case.part)))
