"""What a checked backward call comes to: the kernels that serve it, made ready, and the memory that they need."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from ..codegen.model import Direction, FusedAdd, Mode, Norm, Tile
from ..dtypes import DTYPES
from ..kernels import pipelines
from ..kernels.gpu import Target, target_of
from ..kernels.key import MOST_ROWS_IN_I32, integer_type, pointer_type, row_count_type
from ..kernels.launcher import Launcher
from ..kernels.pipelines import row_alignment
from ..kernels.tile_choice import choose, staged
from ..selection import dispatch
from ..upstream.torch_allocator import allocator
from ..upstream.triton_launcher import Grid, Launch
from .arguments import row_stride
from .gradient_arguments import GradientCall
from .outputs import aligned_length

# The pointers that a call brings, in the order in which launches do.
INPUTS = ("dy_ptr", "x_ptr", "x_bias_ptr", "weight_ptr", "mean_ptr", "rstd_ptr", "dresidual_out_ptr")
SUMS = ("dweight", "dbias", "dx_bias")


class Summing(NamedTuple):
    """How partial sums are added up: how many rows of them at a time, columns a program, and warps."""

    rows: int
    block: int
    warps: int


# 16 values a thread, and narrow, so that few columns are shared by many programs: 4096x1024 takes an H200 18 us in all,
# and 29 with 16 rows of 128 columns. The interpreter takes as long for a program of few columns as for one of many, and
# 25 s for a row of 17000 in narrow ones.
_SUMMING = Summing(rows=128, block=16, warps=4)
_INTERPRETED_SUMMING = Summing(rows=16, block=1024, warps=4)

# How many M a plan keeps the layouts of.
_LAYOUTS = 64


@dataclass(frozen=True)
class Step:
    """How a kernel is launched, and its grid from M and the number of programs that share the rows."""

    launch: Launch
    grid: Callable[[int, int], Grid]


@dataclass(frozen=True)
class Prepared:
    """The kernels for one class of M.

    Attributes:
        launchers: every kernel.
        steps: those that walk the rows, in order.
        finish: launches what adds up their partial sums; None where no sum is wanted.
        finish_grid: its programs.
        rows: rows that a program takes at a time.
        most_programs: how many share the rows, where there are as many tiles of rows.
        row_terms: how many values a row the first step leaves for the next: `pipelines.Row.row_terms`.
        exchange: from M to how many int64 the programs exchange values through; None where they do not.
        by_address: whether launches take addresses.
    """

    launchers: tuple[Launcher, ...]
    steps: tuple[Step, ...]
    finish: Launch | None
    finish_grid: Grid
    rows: int
    most_programs: int
    row_terms: int
    exchange: Callable[[int], int] | None
    by_address: bool


class Layout(NamedTuple):
    """How the kernels are launched for one M, and what lies where in the fp32 memory that they share.

    Attributes:
        steps: how the kernels that walk the rows are launched, in order, and their grids.
        finish: launches what adds up their partial sums; None where no sum is wanted.
        finish_grid: its programs.
        programs: how many share the rows.
        starts: where the partial sums of each of `SUMS` start, in elements, None of what is not wanted; then each of
            the values that the first step leaves for the next.
        offsets: the same in bytes; 0 of what is not wanted, which no compiled kernel reads.
        length: of the memory, in elements.
        exchange: how many int64 the programs exchange values through.
        by_address: whether launches take addresses.
    """

    steps: tuple[tuple[Launch, Grid], ...]
    finish: Launch | None
    finish_grid: Grid
    programs: int
    starts: tuple[int | None, ...]
    offsets: tuple[int, ...]
    length: int
    exchange: int
    by_address: bool


class GradientPlan:
    """All that backward calls of one kind share, whatever their M. It holds none of a call's tensors.

    Attributes:
        n: row length.
        dx_dtype: dx's; None where it is not wanted.
        empty: makes tensors on the device.
        sum_dtypes: those of `SUMS`; None of what is not wanted.
        layout: from M to the `Layout` of its launches.
    """

    def __init__(self, call: GradientCall, misaligned: Collection[str], target: Target | None = None) -> None:
        """Find the instance that serves a call whose dy is there.

        Args:
            call: what was asked.
            misaligned: which of `INPUTS` are at no multiple of 16 bytes.
            target: as in `Plan`.

        Raises:
            MissingInstanceError: nothing serves the call and nothing may be generated.
        """
        assert call.dy is not None
        x, weight, n, wants = call.x, call.weight, call.n, call.wants
        self.n, self._target = n, target or target_of(x.device)
        self._launches_on = x.device if target is None else None
        self._summing = _SUMMING if self._target.compiles else _INTERPRETED_SUMMING
        fadd = FusedAdd.NONE if call.dresidual_out is None else FusedAdd.PRE_ADD_STORE
        self._mode = mode_of(call.norm, x, call.x_bias is not None, fadd)
        self._entry = dispatch.find(self._mode, n)
        self._prepared: list[Prepared | None] = [None, None, None]

        self.dx_dtype = (call.dx_dtype or x.dtype) if "dx" in wants else None
        self.empty = allocator(x.device)
        dtypes_of_sums = (
            None if weight is None else weight.dtype,
            call.bias_dtype or (x if weight is None else weight).dtype,
            None if call.x_bias is None else call.x_bias.dtype,
        )
        self.sum_dtypes = tuple(
            dtype if name in wants else None for name, dtype in zip(SUMS, dtypes_of_sums, strict=True)
        )
        self.layout = lru_cache(_LAYOUTS)(self._lay_out)

        self._strides = {
            "dy_row_stride": row_stride("dy", call.dy),
            "x_row_stride": row_stride("x", x),
            "dresidual_out_row_stride": (
                0 if call.dresidual_out is None else row_stride("dresidual_out", call.dresidual_out)
            ),
            "dx_row_stride": n,
        }
        rows = (call.dy, x, call.dresidual_out)
        self._itemsizes = tuple(tensor.element_size() for tensor in rows if tensor is not None)
        centred = torch.float32 if call.norm.centres else None
        given = (call.dy, x, call.x_bias, weight)
        dtypes = [None if tensor is None else tensor.dtype for tensor in given]
        dtypes += [centred, torch.float32, None if call.dresidual_out is None else call.dresidual_out.dtype]
        self._misaligned = misaligned
        self._inputs = {
            name: None if dtype is None else pointer_type(dtype, aligned=name not in misaligned)
            for name, dtype in zip(INPUTS, dtypes, strict=True)
        }

    def prepared(self, m: int) -> Prepared:
        """The kernels for m rows; the first call of each class of M compiles them."""
        size = 0 if m <= self._entry.small_m else 1 if m <= MOST_ROWS_IN_I32 else 2
        return self._prepared[size] or self._prepare(size, m)

    def _lay_out(self, m: int) -> Layout:
        ready = self.prepared(m)
        programs = min(ready.most_programs, -(-m // ready.rows))
        section, term = aligned_length(programs * self.n), aligned_length(m)
        starts: list[int | None] = []
        length = 0
        for dtype in self.sum_dtypes:
            starts.append(None if dtype is None else length)
            length += 0 if dtype is None else section
        for _ in range(ready.row_terms):
            starts.append(length)
            length += term
        return Layout(
            steps=tuple((step.launch, step.grid(m, programs)) for step in ready.steps),
            finish=ready.finish,
            finish_grid=ready.finish_grid,
            programs=programs,
            starts=tuple(starts),
            offsets=tuple(0 if start is None else start * torch.float32.itemsize for start in starts),
            length=length,
            exchange=0 if ready.exchange is None else ready.exchange(m),
            by_address=ready.by_address,
        )

    def _prepare(self, size: int, m: int) -> Prepared:
        entry, n, target = self._entry, self.n, self._target
        choices = entry.choices(m, target.arch)
        is_paired = pipelines.is_paired(n, row_alignment(*self._strides.values()), self._misaligned)
        chosen = choose(self._mode, choices, n, target)
        tile = staged(chosen, choices[-1], n, self._itemsizes, is_paired, target)
        rule = pipelines.BACKWARD[tile.pipeline]
        walkers = [self._launcher(step, rule, tile, m) for step in rule.steps]
        grids = [step.grid(tile, n, target) for step in rule.steps]
        finisher = self._finisher() if any(self.sum_dtypes) else None
        launchers = (*walkers, finisher) if finisher is not None else tuple(walkers)
        by_address = None not in [launcher.launch for launcher in launchers]
        found = Prepared(
            launchers=launchers,
            steps=tuple(Step(_launch(by, by_address), grid) for by, grid in zip(walkers, grids, strict=True)),
            finish=None if finisher is None else _launch(finisher, by_address),
            finish_grid=(-(-n // self._summing.block), len(SUMS), 1),
            rows=tile.rows,
            most_programs=rule.programs(tile, n, target),
            row_terms=len(rule.row_terms),
            exchange=None if rule.exchange is None else rule.exchange(tile, n),
            by_address=by_address,
        )
        self._prepared[size] = found
        return found

    def _launcher(self, step: pipelines.Step, rule: pipelines.Row, tile: Tile, m: int) -> Launcher:
        partial = pointer_type(torch.float32, aligned=True)
        types = {
            **self._inputs,
            "dx_ptr": None if self.dx_dtype is None else pointer_type(self.dx_dtype, aligned=True),
            **{f"{name}_ptr": partial if dtype else None for name, dtype in zip(SUMS, self.sum_dtypes, strict=True)},
            **dict.fromkeys(rule.row_terms, partial),
            "exchange_ptr": None if rule.exchange is None else pointer_type(torch.int64, aligned=True),
            "M": row_count_type(m),
            "weight_offset": "fp32",
        }
        chunked = replace(tile, block=step.block(tile))
        constants = {
            **pipelines.constants(
                chunked, self.n, row_alignment(*self._strides.values()), self._misaligned, self._target
            ),
            **rule.constants(tile, self.n),
        }
        kernel = self._entry.load(step.part or tile.pipeline)
        options = pipelines.compiler_options(rule.options, tile, self._target)
        return Launcher(kernel, types, self._strides, constants, tile.warps, options, self._target, self._launches_on)

    def _finisher(self) -> Launcher:
        partial = pointer_type(torch.float32, aligned=True)
        wanted = tuple(zip(SUMS, self.sum_dtypes, strict=True))
        gradients = {f"{name}_ptr": None if d is None else pointer_type(d, aligned=True) for name, d in wanted}
        partials = {f"{name}_partials_ptr": partial if dtype else None for name, dtype in wanted}
        summing, target = self._summing, self._target
        constants = {"N": self.n, "ROWS": summing.rows, "BLOCK": summing.block, "PDL": target.launches_early}
        types = {**partials, **gradients, "programs": integer_type(0)}
        kernel = self._entry.load_finaliser()
        return Launcher(kernel, types, {}, constants, summing.warps, {}, target, self._launches_on)


def _launch(launcher: Launcher, by_address: bool) -> Launch:
    return launcher.launch if by_address and launcher.launch is not None else launcher.launch_tensors


def mode_of(norm: Norm, x: torch.Tensor, x_bias: bool, fadd: FusedAdd) -> Mode:
    """The mode of a backward call; fadd says whether the stored sum has a gradient."""
    dtype = DTYPES[x.dtype]
    return Mode(norm, dtype, dtype, fadd, x_bias=x_bias, direction=Direction.BACKWARD)
