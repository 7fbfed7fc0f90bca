"""Tiles on trial: compiled side by side, held against the reference, and timed on the GPU that is here."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch

from ..codegen.candidates import candidates
from ..codegen.groups import Activation, AnyMode, GroupMode
from ..codegen.instance import Bucket, Tile
from ..codegen.model import Mode
from ..codegen.tiling import GROUP_LAYOUTS, Load, TileClass
from ..codegen.values import Direction, DType, FusedAdd, FusedQuant, Gating, Norm, ScaleGroup
from ..kernels.gpu import architecture, target_of
from ..selection import dispatch, on_demand
from ..selection.table import Entry, RetiledTable
from . import group_run
from .checked_run import Run, prepare
from .group_run import GroupProblem
from .problem import Problem
from .timing import graph_ms, median_ms

# A row length for the bucket that has no cap.
UNCAPPED_LENGTH = 262144

# A tile must be so much faster than the present one to take its place: two runs of one tile differ by up to 1 %.
MARGIN = 1.01

# Those that came out fastest are timed again, longer, beside the present one.
_FINALISTS = 3

# So much longer than the fastest of many rows the tile for every M may take, if it is faster of a few: beyond SMALL_M
# rows, batch invariance is not to cost more than 3 %.
MOST_SLOWER = 1.03

_LOADS: dict[Load, dict[str, Any]] = {
    Load.PLAIN: {},
    Load.ADD: {"fadd": FusedAdd.PRE_ADD_STORE},
    Load.QUANT: {
        "fadd": FusedAdd.PRE_ADD_STORE,
        "fquant": FusedQuant.SMOOTH_DYNAMIC,
        "dtype_out": DType.INT8,
    },
    Load.SCALED: {
        "fadd": FusedAdd.PRE_ADD_STORE,
        "fquant": FusedQuant.DYNAMIC,
        "group_size": ScaleGroup.G128,
        "dtype_out": DType.FP8_E4M3FN,
    },
    Load.GATE: {"gating": Gating.AFTER_NORM},
    Load.DROP: {"fadd": FusedAdd.PRE_ADD_STORE, "dropout": True},
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        bytes: of x, for many rows: more than any L2 cache holds.
        few: rows, where they are few.
        checked: rows that a tile is held against the reference with.
    """

    bytes: int = 2**28
    few: int = 64
    checked: int = 70


@dataclass(frozen=True)
class Case:
    """What one tile is sought for: a class of modes, a bucket, and whether rows are few; None is of every M."""

    kind: TileClass
    bucket: Bucket
    few: bool | None

    @property
    def n(self) -> int:
        """The row length that stands for the bucket: its longest."""
        return self.bucket.last or max(UNCAPPED_LENGTH, self.bucket.first)

    @cached_property
    def mode(self) -> AnyMode:
        """The mode that stands for the class."""
        if self.kind.is_grouped:
            return self._group_mode
        dtype = DType.BF16 if self.kind.itemsize == DType.BF16.itemsize else DType.FP32
        norm = Norm.RMS if self.kind.rms else Norm.LAYER
        return Mode(
            norm, **{"dtype_in": dtype, "dtype_out": dtype, "direction": self.kind.direction, **_LOADS[self.kind.load]}
        )

    def rows(self, sizes: Sizes) -> int:
        """How many rows are timed."""
        return sizes.few if self.few else max(1, sizes.bytes // (self.n * self.kind.itemsize))

    @property
    def _group_mode(self) -> GroupMode:
        dtype = DType.BF16 if self.kind.itemsize == DType.BF16.itemsize else DType.FP32
        return GroupMode(dtype, self.kind.direction, Activation.SILU, self.kind.layout == GROUP_LAYOUTS[True])

    def run(self, m: int, device: torch.device) -> Run[Any]:
        """The case on tensors of m rows."""
        mode = self.mode
        if isinstance(mode, GroupMode):
            return group_run.prepare(GroupProblem.of_length(mode, self.n, m), device)
        forward = replace(mode, direction=Direction.FORWARD)
        return prepare(Problem(m, self.n, forward, backward=mode.is_backward), device)

    def entry(self) -> Entry:
        """The instance, from a module that holds every pipeline."""
        return _entry(self.mode, self.n)

    def tiles(self, device: torch.device, rows: int) -> list[Tile]:
        """The tile in use, then those that may be better."""
        arch = architecture(device)
        entry = self.entry() if self.few is not None else self.entry().invariant
        present = entry.tile(rows, arch)
        asked = (False, True) if self.few is None else (self.few,)
        found = [tile for few in asked for tile in candidates(self.kind, self.bucket, self.n, arch, few=few)]
        if self.few is None:
            found = [tile for tile in found if tile.pipeline.takes_rows_alike]
        mode = self.mode
        if isinstance(mode, GroupMode):
            found = [tile for tile in found if group_run.fits(mode, self.n, tile, target_of(device))]
        return list(dict.fromkeys((present, *found)))


@cache
def _entry(mode: AnyMode, n: int) -> Entry:
    return on_demand.generate(mode, n, "a table of candidates")


@dataclass(frozen=True)
class Trial:
    """A tile for a case."""

    case: Case
    tile: Tile


@dataclass(frozen=True)
class Outcome:
    """What the trials of a case came to.

    Attributes:
        case: what a tile was sought for.
        rows: how many rows were timed.
        present: the tile in use until now.
        present_ms: its time; None if it does not run on this GPU.
        best: the fastest tile; the present one, unless another beats it by `MARGIN`.
        best_ms: its time.
        gb_per_s: bytes that it moves in that time.
        tried: how many tiles ran.
        refused: why others did not.
    """

    case: Case
    rows: int
    present: Tile
    present_ms: float | None
    best: Tile
    best_ms: float
    gb_per_s: float
    tried: int
    refused: tuple[str, ...]


@contextmanager
def tiled(trial: Trial) -> Iterator[None]:
    """Make calls of a trial's mode and length take its tile."""
    with dispatch.using(RetiledTable(dispatch.loaded(), trial.case.entry(), trial.tile)):
        yield


def compile_all(trials: Sequence[Trial], device: torch.device, jobs: int, advance: Callable[[], object]) -> None:
    """Compile the kernels of trials into Triton's cache, in processes of their own.

    What fails here fails again, and is recorded, when its turn comes.

    Args:
        trials: what to compile.
        device: what to compile for.
        jobs: how many processes; 0 compiles nothing ahead.
        advance: called when a trial is done.
    """
    if not jobs:
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(_compile, trial, device) for trial in trials]
        for done in as_completed(pending):
            done.exception()
            advance()


def _compile(trial: Trial, device: torch.device) -> None:
    with tiled(trial):
        trial.case.run(1, device).call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decide(case: Case, device: torch.device, sizes: Sizes, advance: Callable[[], object]) -> Outcome | None:
    """Try every tile of a case and take the fastest whose outputs are right.

    Of those for every M, whatever takes little longer than the fastest of many rows is sought for a few.

    Args:
        case: what a tile is sought for.
        device: the GPU.
        sizes: how many rows.
        advance: called when a tile has been tried.

    Returns:
        None if no tile runs here.
    """
    rows = case.rows(sizes)
    times: dict[Tile, float] = {}
    refused = []
    run = case.run(rows, device)
    checked = case.run(sizes.checked, device)
    present, *others = case.tiles(device, rows)
    for tile in (present, *others):
        trial = Trial(case, tile)
        problem = _why_not(trial, checked)
        if problem is None:
            times[tile] = _time(trial, run, repeat=10)
        else:
            refused.append(f"{case.mode.name}, N = {case.n}, {tile.row}: {problem}")
        advance()
    if not times:
        return None
    most = 3 * _FINALISTS if case.few is None else _FINALISTS
    finalists = {*sorted(times, key=times.__getitem__)[:most], *({present} & times.keys())}
    final = {tile: _time(Trial(case, tile), run, repeat=50) for tile in finalists}
    best = _best(final, present)
    if case.few is None:
        near = [tile for tile in final if final[tile] <= final[best] * MOST_SLOWER]
        few = case.run(sizes.few, device)
        best = _best({tile: _time(Trial(replace(case, few=True), tile), few, repeat=50) for tile in near}, present)
    with tiled(Trial(case, best)):
        moved = run.moved(run.call())
    rate = moved / final[best] / 1e6
    return Outcome(case, rows, present, final.get(present), best, final[best], rate, len(times), tuple(refused))


def _best(times: Mapping[Tile, float], present: Tile) -> Tile:
    """The fastest of some tiles, or the present one if it takes hardly longer."""
    best = min(times, key=times.__getitem__)
    return present if present in times and times[present] <= times[best] * MARGIN else best


def _why_not(trial: Trial, run: Run[Any]) -> str | None:
    """What is wrong with a trial's kernel, or None."""
    try:
        with tiled(trial):
            findings = run.validate(run.call())
    except Exception as error:
        # A kernel that needs more registers or shared memory than there are; a pipeline that is not for this GPU.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    wrong = [finding.name for finding in findings if not finding.ok]
    return f"{', '.join(wrong)} differ from the reference" if wrong else None


def _time(trial: Trial, run: Run[Any], repeat: int) -> float:
    with tiled(trial):
        if trial.case.few:
            return graph_ms(run.call, calls=20, repeat=repeat)
        return median_ms(run.call, warmup=2, repeat=repeat)
