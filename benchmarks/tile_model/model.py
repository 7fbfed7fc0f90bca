"""Tiles of some modes and lengths on GPUs that are not here: their kernels compiled, and what follows for each."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from normforge.ahead_of_time.compile_keys import compile_keys
from normforge.codegen.instance import ANY, Tile
from normforge.codegen.model import Mode
from normforge.codegen.values import Direction, DType, FusedAdd, FusedQuant, Norm
from normforge.kernels.gpu import named_target
from normforge.kernels.obtain import compile_for
from normforge.kernels.pipelines import row_of
from normforge.selection import dispatch
from normforge.selection.table import RetiledTable

from ..suites.shapes import LENGTHS as TIMED_LENGTHS
from .binaries import Usage, usage_of
from .devices import DEVICES

FEW, MANY = ROWS = ("few", "many")
FEW_M, X_BYTES = 64, 2**28
# Whose tiles: those of the rule for any architecture, or those of the table of the one that was measured.
RULE, TABLE = "rule", "table"
MEASURED = "sm_90"
# The calls that tiles were timed at, named as suites.
TIMED_KINDS = ("forward", "backward")

# The ends of buckets of the standard ladder where the rules change, and some between.
LENGTHS = (128, 512, 1024, 2048, 4096, 5120, 8192, 16384, 32768, 131072)


@dataclass(frozen=True)
class Kind:
    """A kind of call.

    Attributes:
        name: in tables.
        mode: of LayerNorm in bf16.
        read: tensors of x's size and type that it reads.
        written: the bytes written, per element of bf16 and of fp32.
    """

    name: str
    mode: Mode
    read: int
    written: tuple[int, int]


# A norm that lacks some forms has the tiles of one that lacks none.
_NORMS = tuple(norm for norm in Norm if not norm.row.lacks)
_PLAIN = Mode(Norm.LAYER, DType.BF16, DType.BF16)
KINDS = {
    kind.name: kind
    for kind in (
        Kind("forward", _PLAIN, 1, (2, 4)),
        Kind("add", replace(_PLAIN, fadd=FusedAdd.PRE_ADD_STORE), 2, (4, 8)),
        Kind(
            "add_quant",
            replace(_PLAIN, fadd=FusedAdd.PRE_ADD_STORE, fquant=FusedQuant.DYNAMIC, dtype_out=DType.INT8),
            2,
            (3, 5),
        ),
        Kind("backward", replace(_PLAIN, direction=Direction.BACKWARD), 2, (2, 4)),
    )
}


@dataclass(frozen=True)
class Case:
    """A tile that is modelled.

    Attributes:
        arch: of which GPU; one of `DEVICES`.
        kind: of call; one of `KINDS`.
        norm: which.
        dtype: x's: bf16 or fp32.
        n: row length.
        rows: `FEW` or `MANY`.
        tiles: `RULE` or `TABLE`.
    """

    arch: str
    kind: str
    norm: Norm
    dtype: DType
    n: int
    rows: str
    tiles: str = RULE

    @cached_property
    def mode(self) -> Mode:
        """The computation."""
        mode = KINDS[self.kind].mode
        out = self.dtype if mode.dtype_out is mode.dtype_in else mode.dtype_out
        return replace(mode, norm=self.norm, dtype_in=self.dtype, dtype_out=out)

    @property
    def norm_name(self) -> str:
        """`ln` or `rms`, as suites and modes call it."""
        return self.mode.name.partition("_")[0]

    @property
    def m(self) -> int:
        """How many rows: where they are many, of `X_BYTES`."""
        return FEW_M if self.rows == FEW else max(1, X_BYTES // (self.n * self.dtype.itemsize))

    @property
    def read_share(self) -> float:
        """The bytes that a call reads, of those that it moves."""
        kind = KINDS[self.kind]
        read = kind.read * self.dtype.itemsize
        return read / (read + kind.written[self.dtype is DType.FP32])


def of_many_rows() -> tuple[Case, ...]:
    """Return the rule's tiles for many rows."""
    return tuple(
        Case(arch, kind, norm, dtype, n, MANY)
        for arch, kind, dtype, norm, n in product(DEVICES, KINDS, (DType.BF16, DType.FP32), _NORMS, LENGTHS)
    )


def every_case() -> tuple[Case, ...]:
    """Return the table's tiles: the rule's per GPU, and for bf16 those of `MEASURED` there and on its successor."""
    many = of_many_rows()
    few = {case: replace(case, rows=FEW) for case in many}
    measured = (
        Case(arch, kind, norm, DType.BF16, n, MANY, TABLE)
        for arch, lengths in ((MEASURED, TIMED_LENGTHS), ("sm_100", LENGTHS))
        for kind, norm, n in product(TIMED_KINDS, _NORMS, lengths)
    )
    # Few rows that take the tile of many are no case of their own.
    ruled = (each for case in many for each in (case, few[case]) if each is case or tile_of(each) != tile_of(case))
    return (*ruled, *measured)


@dataclass(frozen=True)
class Row:
    """A kernel of a case, and what follows from its binary.

    Attributes:
        arch: of which GPU.
        tiles: whose: `rule`, or `table` of the H200's.
        kind: of call.
        norm: `ln` or `rms`.
        dtype: x's.
        n: row length.
        rows: `few` or `many`.
        tile: pipeline, rows, block, warps, and what else is not its default.
        kernel: its name; backward there may be two, without the one that adds up partial sums.
        threads: of a program.
        registers: of a thread.
        spilled_bytes: of a thread.
        shared_bytes: of a program.
        resident: programs that fit a multiprocessor.
        limit: what keeps another out.
        at_work: programs that a multiprocessor has, of those that are launched.
        in_flight: bytes that those have on their way at most.
        needed: bytes that it takes for the memory's bandwidth; many rows are meant.
    """

    arch: str
    tiles: str
    kind: str
    norm: str
    dtype: str
    n: int
    rows: str
    tile: str
    kernel: str
    threads: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    resident: int
    limit: str
    at_work: int
    in_flight: int
    needed: int

    @property
    def margin(self) -> float:
        """The bytes in flight over the bytes needed in flight."""
        return self.in_flight / self.needed


def tile_of(case: Case) -> Tile:
    """Return the tile that is modelled."""
    entry = dispatch.find(case.mode, case.n)
    tiles = entry.tiles_on(ANY if case.tiles == RULE else MEASURED)
    return tiles.small if case.rows == FEW else tiles.large


def model(case: Case) -> list[Row]:
    """Compile a case's kernels, and read them; what adds up partial sums backward is left out."""
    target, tile, entry = named_target(case.arch), tile_of(case), dispatch.find(case.mode, case.n)
    with dispatch.using(RetiledTable(dispatch.loaded(), entry, tile)):
        keys = compile_keys([case.n], [case.mode], arch=case.arch, rows=(case.rows,))
    steps = row_of(case.mode, tile.pipeline)
    grids = {case.mode.kernel(step.part or tile.pipeline): step.grid(tile, case.n, target) for step in steps.steps}
    programs = steps.programs(tile, case.n, target)
    rows = []
    for key in keys:
        if key.key.symbol in grids:
            launched = prod(grids[key.key.symbol](case.m, programs))
            usage = usage_of(compile_for(key.key, key.function, target), target)
            rows.append(_row(case, tile, key.key.symbol, launched, usage))
    return rows


def _row(case: Case, tile: Tile, kernel: str, launched: int, usage: Usage) -> Row:
    device = DEVICES[case.arch]
    resident, limit = device.resident(usage)
    at_work = min(resident, -(-launched // device.multiprocessors))
    return Row(
        case.arch,
        case.tiles,
        case.kind,
        case.norm_name,
        case.dtype.value,
        case.n,
        case.rows,
        " ".join(map(str, tile.row)),
        kernel,
        usage.threads,
        usage.registers,
        usage.spilled_bytes,
        usage.shared_bytes,
        resident,
        limit,
        at_work,
        at_work * usage.threads * usage.loading_bytes,
        round(device.needed_bytes(case.read_share)),
    )


def model_all(cases: Sequence[Case], jobs: int, advance: Callable[[], object]) -> list[Row]:
    """Model cases in processes, and return their rows in the order of the cases."""
    processes = jobs or os.cpu_count() or 1
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _quiet) as pool:
        futures = [pool.submit(model, case) for case in cases]
        for done in as_completed(futures):
            done.result()
            advance()
    return [row for future in futures for row in future.result()]


def _quiet() -> None:
    # NVIDIA's disassembler warns of the format of every binary of sm_100.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
