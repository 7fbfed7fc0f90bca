"""Trials of tiles: compared with the reference, and timed on the GPU that is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from statistics import geometric_mean
from typing import Any

import torch

from ..call_kinds import LEAST_ROWS_OF_SAMPLE
from ..codegen.candidates import candidates
from ..codegen.groups import Activation, AnyMode, GroupMode
from ..codegen.instance import Bucket, Tile, Tiles
from ..codegen.lazy import cached_property
from ..codegen.model import Mode
from ..codegen.tiling import GROUP_LAYOUTS, Load, TileClass, power_of_two
from ..codegen.values import Direction, DType, FusedAdd, FusedQuant, Gating, Norm, ScaleGroup
from ..kernels.gpu import target_of
from ..selection import dispatch, on_demand
from ..selection.table import Entry, RetiledTable
from . import group_run
from .checked_run import prepare
from .group_problem import LENGTHS, GroupProblem
from .measured_run import Run
from .problem import Problem
from .timing import graph_ms, median_ms
from .tune_options import Size as Size

# A length a quarter up its bucket is an odd multiple of half of this: 16 bytes and no more divide its rows. In the
# middle, 16385..32768 is one chunk of 16384 and a half, and a tile of those took 387 us of 20736 columns.
_UNFILLED = 16

# A row length for the bucket that has no cap.
UNCAPPED_LENGTH = 262144

# Samples of modulated rows, if there are as many rows: a batch of pictures.
_SAMPLES = 32

# A tile must be so much faster than the present one to take its place: two runs of one tile differ by up to 1 %.
MARGIN = 1.01

# The number of fastest tiles that are timed again, longer, beside the present tile.
_FINALISTS = 3

# The tile for every M may be slower than the fastest tile for many rows by this factor, if it is faster for few rows:
# beyond SMALL_M rows, batch invariance costs 3 % at most.
MOST_SLOWER = 1.03

_LOADS: dict[Load, dict[str, Any]] = {
    Load.PLAIN: {},
    Load.ADD: {"fadd": FusedAdd.PRE_ADD_STORE},
    Load.QUANT: {
        "fadd": FusedAdd.PRE_ADD_STORE,
        "fquant": FusedQuant.SMOOTH_DYNAMIC,
        "dtype_out": DType.INT8,
    },
    **{
        load: {
            "fadd": fadd,
            "fquant": FusedQuant.DYNAMIC,
            "group_size": ScaleGroup.G128,
            "dtype_out": DType.FP8_E4M3FN,
        }
        for load, fadd in ((Load.SCALED, FusedAdd.NONE), (Load.ADD_SCALED, FusedAdd.PRE_ADD_STORE))
    },
    Load.GATE: {"gating": Gating.AFTER_NORM},
    Load.DROP: {"fadd": FusedAdd.PRE_ADD_STORE, "dropout": True},
    Load.MODULATE: {"modulated": True},
    Load.FP8: {"dtype_in": DType.FP8_E4M3FN},
    Load.RENORM: {"fadd": FusedAdd.POST_ADD_NORM},
}


class Timer(Enum):
    """How calls are timed: in a CUDA graph, with operands in L2, or with L2 overwritten before each call."""

    GRAPH = "graph"
    COLD = "cold"


_TIMERS: dict[Timer, Callable[[Callable[[], object], int], float]] = {
    Timer.GRAPH: lambda call, repeat: graph_ms(call, calls=20, repeat=repeat),
    Timer.COLD: lambda call, repeat: median_ms(call, warmup=2, repeat=repeat),
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        bytes: of x, for many rows: more than any L2 cache holds.
        few: numbers of rows, where they are few: one tile serves all, and the mean of its times counts.
        some: numbers of rows above `few` that hardly fill a GPU.
        checked: the number of rows that a tile is compared with the reference on.
    """

    bytes: int = 2**28
    few: tuple[int, ...] = (16, 64, 256)
    some: tuple[int, ...] = (512, 1024, 2048)
    checked: int = 70


@dataclass(frozen=True)
class Case:
    """A search for one tile: a class of modes, a bucket, and a size of M."""

    kind: TileClass
    bucket: Bucket
    size: Size

    @property
    def n(self) -> int:
        """The row length that represents the bucket: the longest; for groups, a length of models if there is one."""
        if self.kind.is_grouped:
            for n in LENGTHS:
                if n in self.bucket:
                    return n
        longest = self.bucket.last or max(UNCAPPED_LENGTH, self.bucket.first)
        return self._unfilling or longest if self.size is Size.RAGGED else longest

    @property
    def lengths(self) -> tuple[int, ...]:
        """The row lengths that are timed: `n`, and of many or some rows a shorter one that fills no chunk.

        Of LayerNorm's tiles for 16385..32768, one takes 137 us of 32768 columns on an H200 and another 138; of 18432
        columns the former takes 169 us and the latter 142.
        """
        shorter = self._unfilling if self.size in (Size.LARGE, Size.SOME) else None
        return (self.n,) if shorter is None else (self.n, shorter)

    @property
    def _unfilling(self) -> int | None:
        """A length a quarter up the bucket, if it is another than its longest."""
        if self.kind.is_grouped or self.bucket.last is None:
            return None
        last = self.bucket.last
        # For rows half as long as the longest a tile is narrowed.
        first = max(self.bucket.first, power_of_two(last) // 2 + 1)
        shorter = (first + (last - first) // 4) // _UNFILLED * _UNFILLED + _UNFILLED // 2
        return shorter if first <= shorter < last else None

    @cached_property
    def mode(self) -> AnyMode:
        """Return the mode that represents the class."""
        if self.kind.is_grouped:
            return self._group_mode
        dtype = DType.BF16 if self.kind.itemsize == DType.BF16.itemsize else DType.FP32
        norm = Norm.RMS if self.kind.rms else Norm.LAYER
        return Mode(
            norm, **{"dtype_in": dtype, "dtype_out": dtype, "direction": self.kind.direction, **_LOADS[self.kind.load]}
        )

    @property
    def timers(self) -> tuple[Timer, ...]:
        """How calls are timed: a few rows in a CUDA graph, as launching them takes longer than they do.

        Some rows both ways: whether what came before left them in L2 decides which tile is fast.
        """
        return {Size.SMALL: (Timer.GRAPH,), Size.SOME: (Timer.GRAPH, Timer.COLD)}.get(self.size, (Timer.COLD,))

    def rows(self, sizes: Sizes, n: int | None = None) -> tuple[int, ...]:
        """Return the numbers of rows to time, with n or `self.n` columns; modulated rows fill all samples evenly."""
        if self.size in (Size.SMALL, Size.SOME):
            return sizes.few if self.size is Size.SMALL else sizes.some
        rows = max(1, sizes.bytes // ((n or self.n) * self.kind.itemsize))
        return (rows - rows % (self._most_samples(rows) or 1),)

    def _most_samples(self, rows: int) -> int:
        """Return the most samples that rows may belong to, 0 for unmodulated rows: all scales and shifts share one L1.

        Backward, kernels take no fewer than `LEAST_ROWS_OF_SAMPLE` of each.
        """
        if self.kind.load is not Load.MODULATE:
            return 0
        return min(_SAMPLES, max(1, rows // (LEAST_ROWS_OF_SAMPLE if self.mode.is_backward else 1)))

    @property
    def _group_mode(self) -> GroupMode:
        dtype = DType.BF16 if self.kind.itemsize == DType.BF16.itemsize else DType.FP32
        return GroupMode(dtype, self.kind.direction, Activation.SILU, self.kind.layout == GROUP_LAYOUTS[True])

    def run(self, m: int, device: torch.device, n: int | None = None) -> Run[Any]:
        """Prepare the case on tensors of m rows with n or `self.n` columns."""
        mode = self.mode
        if isinstance(mode, GroupMode):
            return group_run.prepare(GroupProblem.of_length(mode, self.n, m), device)
        forward = replace(mode, direction=Direction.FORWARD)
        samples = next((each for each in range(self._most_samples(m), 0, -1) if m % each == 0), 0)
        return prepare(Problem(m, n or self.n, forward, backward=mode.is_backward, samples=samples), device)

    def entry(self) -> Entry:
        """Return the instance, from a module that holds every pipeline."""
        return _entry(self.mode, self.n)

    def tiles(self, device: torch.device, many: Tile | None = None) -> list[Tile]:
        """List the tile in use, the tile for many rows if that is the fallback, and the candidates."""
        arch = target_of(device).arch
        tiles = self.entry().tiles_on(arch)
        few, some, large = tiles.by_rows
        present = {
            Size.LARGE: large,
            Size.SMALL: few,
            Size.SOME: some,
            Size.RAGGED: tiles.ragged or large,
            Size.INVARIANT: tiles.for_every_m,
        }[self.size]
        sizes = self.size.candidates
        tried = [tile for few in sizes for tile in candidates(self.kind, self.bucket, self.n, arch, few=few)]
        if self.size is Size.INVARIANT:
            tried = [tile for tile in tried if tile.pipeline.takes_rows_alike]
        mode = self.mode
        if isinstance(mode, GroupMode):
            tried = [tile for tile in tried if group_run.fits(mode, self.n, tile, target_of(device))]
        return list(dict.fromkeys((present, *([many] if many else []), *tried)))


@dataclass(frozen=True)
class Row:
    """A row of a table of tiles: a class and a bucket, whose tiles for some sizes of M are sought together.

    Attributes:
        kind: the class of modes.
        bucket: the row lengths.
        sizes: which are sought, in the order of `Size`.
        kept: the row as a table has it, whose tiles of other sizes stay; None if there are no others.
    """

    kind: TileClass
    bucket: Bucket
    sizes: tuple[Size, ...] = tuple(Size)
    kept: Tiles | None = None

    @property
    def cases(self) -> tuple[Case, ...]:
        """The searches for tiles; only kernels of rows have a tile for ragged lengths."""
        takes_ragged = self.bucket.last is not None and not self.kind.is_grouped
        sizes = [size for size in self.sizes if takes_ragged or size is not Size.RAGGED]
        return tuple(Case(self.kind, self.bucket, size) for size in sizes)

    def trials(self, device: torch.device) -> list[Trial]:
        """Every kernel that has to be compiled: a tile is once, whether for few rows or for many."""
        tiles = [tile for case in self.cases for tile in case.tiles(device, self._many(case, device, []))]
        return [Trial(self.cases[0], tile) for tile in dict.fromkeys(tiles)]

    def tries(self, device: torch.device) -> int:
        """How many tiles are tried, unless another for many rows is found that some rows had none of."""
        return sum(len(case.tiles(device, self._many(case, device, []))) for case in self.cases)

    def decide(self, device: torch.device, sizes: Sizes, advance: Callable[[], object]) -> list[Outcome]:
        """Return the outcome of each case; see `decide`."""
        outcomes: list[Outcome] = []
        for case in self.cases:
            outcomes.append(decide(case, device, sizes, advance, self._many(case, device, outcomes)))
        return outcomes

    def _many(self, case: Case, device: torch.device, outcomes: list[Outcome]) -> Tile | None:
        """Return the tile for many rows if that may serve a case: the one just found, kept or in use."""
        if not case.size.yields:
            return None
        won = [each.winner.tile for each in outcomes if each.case.size is Size.LARGE and each.winner is not None]
        return won[0] if won else (self.kept or case.entry().tiles_on(target_of(device).arch)).large


@cache
def _entry(mode: AnyMode, n: int) -> Entry:
    return on_demand.generate(mode, n, "a table of candidates")


@dataclass(frozen=True)
class Trial:
    """A tile for a case."""

    case: Case
    tile: Tile


@dataclass(frozen=True)
class Tried:
    """The outcome of one tile's trial; times are medians in milliseconds, or the geometric mean of several.

    Attributes:
        tile: what was tried.
        ms: of 10 calls; None if it does not run on this GPU, or is wrong.
        final_ms: of 50, of those that were fastest and the present one.
        few_ms: of 50 with few rows, of those that may serve every M.
        problem: why it cannot win.
    """

    tile: Tile
    ms: float | None
    final_ms: float | None
    few_ms: float | None
    problem: str | None


@dataclass(frozen=True)
class Winner:
    """The tile that a case gets.

    Attributes:
        tile: the fastest; the present one, unless another beats it by `MARGIN`.
        ms: its time.
        gb_per_s: bytes that it moves in that time.
    """

    tile: Tile
    ms: float
    gb_per_s: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case's trials.

    Attributes:
        case: what a tile was sought for.
        rows: the numbers of rows that were timed, of the longest row.
        present: the tile in use until now.
        tried: every tile, the present one first.
        winner: None if no tile runs here.
    """

    case: Case
    rows: tuple[int, ...]
    present: Tile
    tried: tuple[Tried, ...]
    winner: Winner | None

    @property
    def present_ms(self) -> float | None:
        """The present tile's time; None if it does not run on this GPU."""
        return next(tried.final_ms for tried in self.tried if tried.tile == self.present)

    @property
    def refused(self) -> tuple[str, ...]:
        """Which tiles cannot win, and why."""
        name = f"{self.case.mode.name}, N = {self.case.n}"
        return tuple(f"{name}, {tried.tile.row}: {tried.problem}" for tried in self.tried if tried.problem is not None)


@contextmanager
def tiled(trial: Trial) -> Iterator[None]:
    """Make calls of a trial's mode and length take its tile."""
    with dispatch.using(RetiledTable(dispatch.loaded(), trial.case.entry(), trial.tile)):
        yield


def decide(
    case: Case, device: torch.device, sizes: Sizes, advance: Callable[[], object], many: Tile | None = None
) -> Outcome:
    """Try every tile of a case and take the fastest whose outputs are right.

    Of those for every M, whatever takes little longer than the fastest of many rows is sought for a few. For some rows,
    and for ragged ones, it is the tile for many, unless another beats it by `MARGIN`.

    Args:
        case: what a tile is sought for.
        device: the GPU.
        sizes: how many rows.
        advance: called when a tile has been tried.
        many: of some rows or ragged ones, the tile for many, which serves them if they get none.
    """
    rows = case.rows(sizes)
    times: dict[Tile, float] = {}
    problems: dict[Tile, str] = {}
    runs = [case.run(m, device, n) for n in case.lengths for m in case.rows(sizes, n)]
    checked = [case.run(sizes.checked, device, n) for n in case.lengths]
    tiles = case.tiles(device, many)
    for tile in tiles:
        trial = Trial(case, tile)
        problem = next(filter(None, (_why_not(trial, run) for run in checked)), None)
        if problem is None:
            times[tile] = _time(trial, runs, repeat=10)
        else:
            problems[tile] = problem
        if device.type == "cuda":
            # The allocator keeps a CUDA graph's memory for other graphs, and frees none of that memory when memory runs
            # out: 27 tiles of rows of 262144 took 86 GiB.
            torch.cuda.empty_cache()
        advance()
    present = tiles[0]
    most = 3 * _FINALISTS if case.size is Size.INVARIANT else _FINALISTS
    finalists = {*sorted(times, key=times.__getitem__)[:most], *(times.keys() & {present, many})}
    final = {tile: _time(Trial(case, tile), runs, repeat=50) for tile in finalists}
    best = _best(final, present)
    if many is not None and best is not None:
        best = _best({tile: final[tile] for tile in (best, many) if tile in final}, many)
    of_few: dict[Tile, float] = {}
    if case.size is Size.INVARIANT and best is not None:
        near = [tile for tile in final if final[tile] <= final[best] * MOST_SLOWER]
        few = [case.run(m, device) for m in sizes.few]
        of_few = {tile: _time(Trial(replace(case, size=Size.SMALL), tile), few, repeat=50) for tile in near}
        best = _best(of_few, present)
    tried = tuple(Tried(tile, times.get(tile), final.get(tile), of_few.get(tile), problems.get(tile)) for tile in tiles)
    return Outcome(case, rows, present, tried, None if best is None else _winner(case, best, final[best], runs))


def _winner(case: Case, tile: Tile, ms: float, runs: Sequence[Run[Any]]) -> Winner:
    with tiled(Trial(case, tile)):
        moved = geometric_mean(run.moved(run.call()) for run in runs)
    return Winner(tile, ms, moved / ms / 1e6)


def _best(times: Mapping[Tile, float], present: Tile) -> Tile | None:
    """Return the fastest tile, or the present tile if that takes hardly longer; None without tiles."""
    if not times:
        return None
    best = min(times, key=times.__getitem__)
    return present if present in times and times[present] <= times[best] * MARGIN else best


def _why_not(trial: Trial, run: Run[Any]) -> str | None:
    """Return the fault of a trial's kernel, or None."""
    try:
        with tiled(trial):
            findings = run.validate(run.call())
    except Exception as error:
        # A kernel that needs more registers or shared memory than there are; a pipeline that is not for this GPU.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    wrong = [finding.name for finding in findings if not finding.ok]
    return f"{', '.join(wrong)} differ from the reference" if wrong else None


def _time(trial: Trial, runs: Sequence[Run[Any]], repeat: int) -> float:
    timers = trial.case.timers
    with tiled(trial):
        return geometric_mean(_TIMERS[timer](run.call, repeat) for run in runs for timer in timers)
