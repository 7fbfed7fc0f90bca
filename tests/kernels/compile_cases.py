"""Which kernels are compiled for which GPU, and what they come to.

Of all legal modes a covering array: any value of an axis, any kernel and any architecture is compiled somewhere and,
where there is time, any two values together, and each kernel of the table's modes for one architecture in turn.
NORMFORGE_ALL_TARGETS=1 asks for each kernel of each legal mode for each architecture.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import normforge
from normforge.ahead_of_time.compile_keys import CompileKey
from normforge.codegen import emit
from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.tiling import REGISTERS, WARP
from normforge.codegen.values import Direction, Part, Pipeline
from normforge.kernels.gpu import Target, named_target
from normforge.kernels.obtain import compile_for
from normforge.selection import dispatch, on_demand
from normforge.selection.table import RetiledTable

from ..covering import axes_of, covering, modes_of_one_gpu
from ..folders import instance

# For each kernel a row length that takes it by rule, and leaves a ragged chunk to mask.
LENGTHS: dict[Pipeline | Part, int] = {
    Pipeline.ROWS: 200,
    # Every row starts at a multiple of 16 bytes.
    Pipeline.ONE_PASS: 1904,
    Part.WINDOW: 1901,
    **dict.fromkeys((Part.COLUMN_AMAX, Part.COLUMNS, Part.BOTH_WAYS), 1904),
    Pipeline.TWO_PASS: 20000,
    Part.UNALIGNED: 20003,
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


def parts_of(mode: Mode) -> Iterable[Pipeline | Part]:
    """Every kernel of a mode's module."""
    return dict.fromkeys(part for pipeline in mode.pipelines for part in emit.parts(mode, pipeline))


@cache
def every_kernel() -> tuple[tuple[Mode, Pipeline | Part], ...]:
    """Each kernel of each legal mode."""
    return tuple((mode, part) for mode in modes_of_one_gpu() for part in parts_of(mode))


def targets_of(part: Pipeline | Part) -> tuple[Target, ...]:
    """The architectures that have a kernel."""
    return tuple(target for target in TARGETS if isinstance(part, Part) or part.runs_on(target.arch))


@cache
def every_case() -> tuple[Case, ...]:
    """The whole space: each kernel of each legal mode, for each architecture that has it."""
    return tuple(Case(mode, part, target) for mode, part in every_kernel() for target in targets_of(part))


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
    """Return what is compiled first: each value of each axis and each kernel, for the architectures in turn."""
    chosen = covering(every_kernel(), lambda kernel: (*axes_of(kernel[0]), kernel[1].name), 1)
    turns = ((mode, part, targets_of(part), turn) for turn, (mode, part) in enumerate(chosen))
    return tuple(Case(mode, part, targets[turn % len(targets)]) for mode, part, targets, turn in turns)


def thorough() -> tuple[Case, ...]:
    """Return what is compiled where there is time."""
    if os.environ.get("NORMFORGE_ALL_TARGETS") == "1":
        return every_case()
    return (*covering(every_case(), columns, 2), *in_turn(of_the_table(), lambda case: (case.mode, case.part)))


TARGETS = tuple(map(named_target, ("sm_80", "sm_90", "sm_100", "gfx942")))
NVIDIA = tuple(target for target in TARGETS if target.is_nvidia)
SM_90 = TARGETS[1]

_MOST_REGISTERS = 255


@dataclass(frozen=True)
class Usage:
    """What a thread of an NVIDIA binary takes: registers, and bytes of stack and of local memory, where it spills."""

    registers: int
    stack: int
    local: int

    def assert_fits(self, tile: Tile, most_stack: int = 0) -> None:
        """Fail unless a multiprocessor holds as many programs as the tile says, and next to nothing is spilled."""
        assert self.registers <= min(REGISTERS // (tile.resident * tile.warps * WARP) // 8 * 8, _MOST_REGISTERS)
        assert self.local == 0
        assert self.stack <= most_stack


def usage(compiled: Any) -> Usage:
    """The resources of a compiled kernel, as cuobjdump reports them."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", report)
    assert found is not None, report
    return Usage(*map(int, found.groups()))


def binary_of(target: Target) -> str:
    """The name of what Triton compiles for a target."""
    return "cubin" if target.is_nvidia else "hsaco"


def keys_of(
    mode: Mode,
    n: int,
    target: Target = SM_90,
    tile: Tile | None = None,
    operands: torch.dtype = torch.float32,
    residual: torch.dtype = torch.float32,
) -> list[CompileKey]:
    """The kernels of a call of many rows, all tensors of which are aligned, and whose rows adjoin.

    Args:
        mode: what is computed.
        n: the row length.
        target: what to compile for.
        tile: how it runs, if not as the rule for any architecture says.
        operands: the element type of weight and bias.
        residual: that of the residual and of the sum that is stored.
    """
    tile = tile or instance(mode, n).tile
    types: dict[str, Any] = {"weight_dtypes": [operands], "residual_dtypes": [residual], "dy_dtypes": [torch.bfloat16]}
    entry = dispatch.find(mode, n)
    if tile.pipeline is Pipeline.SPREAD:
        # Committed modules have this kernel where a measured table takes it; a module that is generated now has all.
        entry = on_demand.generate(mode, n, dispatch.loaded().where)
    with dispatch.using(RetiledTable(dispatch.loaded(), entry, tile)):
        return normforge.compile_keys([n], [mode], arch=target.arch, rows=["many"], **types)


def compiled(
    mode: Mode,
    n: int,
    target: Target = SM_90,
    tile: Tile | None = None,
    part: Pipeline | Part | None = None,
    **types: torch.dtype,
) -> Any:
    """Compile one of the kernels of `keys_of`: a part, or the kernel that carries its pipeline's name.

    Returns:
        Triton's `CompiledKernel`, its texts and binary in `asm`.
    """
    symbol = mode.kernel(part or (tile or instance(mode, n).tile).pipeline)
    (key,) = [key for key in keys_of(mode, n, target, tile, **types) if key.key.symbol == symbol]
    return compile_for(key.key, key.function, target)
