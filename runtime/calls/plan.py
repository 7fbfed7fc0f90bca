"""What a checked call comes to: the kernels that serve it, made ready, and the types of what it returns.

Forward and backward alike. Which tensors there are, in what order launches bring them and what types they have follows
from the rows of `codegen.parameters`; which kernels run, with what grids and constants, from those of
`kernels.pipelines`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from ..codegen.families import Family, Kind, Parameter, Result
from ..codegen.instance import Tile
from ..codegen.model import DType
from ..codegen.parameters import BACKWARD
from ..dtypes import TORCH_DTYPES
from ..kernels import pipelines
from ..kernels.gpu import Target, target_of
from ..kernels.key import MOST_ROWS_IN_I32, integer_type, pointer_type, row_count_type
from ..kernels.launcher import Launcher
from ..kernels.pipelines import row_alignment
from ..kernels.row_walk import RowStride
from ..kernels.tile_choice import choose, staged, takes_window, window_tile
from ..selection import dispatch
from ..upstream.torch_allocator import allocator
from ..upstream.triton_launcher import Grid, Launch
from .check import Call
from .outputs import aligned_length
from .overlap import REPLACEABLE, Extent, Extents, extent_of
from .row_layout import row_stride, sample_stride

# The gradients that are sums over rows: programs leave partial sums of each, and a last kernel adds them up.
SUMS = tuple(row.name for row in BACKWARD.results if row.kind is Kind.VECTOR)


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

# What kernels leave for one another.
_PARTIAL = pointer_type(torch.float32, aligned=True)


@dataclass(frozen=True, slots=True)
class Step:
    """A kernel that is ready, how it is launched, and from M and the programs that share the rows to its grid."""

    launcher: Launcher
    launch: Launch
    grid: pipelines.Programs


@dataclass(frozen=True, slots=True)
class Prepared:
    """The kernels for one class of M.

    Attributes:
        steps: those that walk the rows, in order.
        finish: the one that adds up their partial sums; None where there are none.
        programs: from M to how many programs share the rows, each with partial sums of its own.
        row_terms: how many fp32 values a row the first step leaves for the next.
        exchange: from M to how many int64 the programs exchange values through; None where they do not.
        by_address: whether launches take addresses, and not tensors.
        grid: the first step's.
        launch: likewise, if it is all there is to launch, by address, of operands and results; None if not.
    """

    steps: tuple[Step, ...]
    finish: Step | None
    programs: Callable[[int], int]
    row_terms: int
    exchange: Callable[[int], int] | None
    by_address: bool
    grid: pipelines.Programs
    launch: Launch | None

    @property
    def launchers(self) -> tuple[Launcher, ...]:
        """Every kernel."""
        return tuple(step.launcher for step in (*self.steps, self.finish) if step is not None)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a backward call's kernels are launched for one M, and what lies where in the memory that they share.

    Attributes:
        steps: how the kernels that walk the rows are launched, in order, and their grids.
        finish: the same of what adds up their partial sums; None where there are none.
        programs: how many share the rows.
        starts: where the partial sums of each of `SUMS` start, in fp32 elements, None of what is not wanted; then each
            of the values that the first step leaves for the next.
        offsets: the same in bytes; 0 of what is not wanted, which no compiled kernel reads.
        length: of that memory, in elements.
        exchange: how many int64 the programs exchange values through.
        by_address: whether launches take addresses, and not tensors.
    """

    steps: tuple[tuple[Launch, Grid], ...]
    finish: tuple[Launch, Grid] | None
    programs: int
    starts: tuple[int | None, ...]
    offsets: tuple[int, ...]
    length: int
    exchange: int
    by_address: bool


class Plan:
    """All that launches of one kind of call share, whatever their M. It holds none of a call's tensors.

    Attributes:
        mode: the call's.
        n: row length.
        empty: makes tensors on the device.
        dtypes: of the family's results; None of what is not asked for.
        y_dtype: y's, forward.
        sum_dtypes: those of `SUMS`; empty forward.
        saves_mean: whether the rows' means are returned.
        as_bytes: which of x and y kernels are handed as bytes.
        extents: where the tensors lie that outputs must not meet.
        layout: from M to the `Layout` of a backward call's launches.
    """

    def __init__(self, call: Call, misaligned: Collection[str], target: Target | None = None) -> None:
        """Find the instance that serves a call; a backward call's dy is there.

        Args:
            call: what was asked.
            misaligned: which pointers, by their slots, are at no multiple of 16 bytes.
            target: the GPU that the call is for, if x, which then stands for another tensor, is not on it: kernels are
                known then, and not compiled. None is x's device.

        Raises:
            MissingInstanceError: nothing serves the call and nothing may be generated.
        """
        self.mode, self.n = mode, n = call.mode, call.n
        self._entry = dispatch.find(mode, n)
        self._small_m = self._entry.small_m
        self._target = target or target_of(call.x.device)
        self._launches_on = call.x.device if target is None else None
        # By class of M: for a few rows, for many, and for more than an i32 counts.
        self._prepared: list[Prepared | None] = [None, None, None]
        self.layout = lru_cache(_LAYOUTS)(self._lay_out)
        self.empty = allocator(call.x.device)

        family = call.function.family
        inputs = {row: _dtype_of_input(row, call) for row in family.inputs}
        results = {row: call.dtype_of(row.name) for row in family.results}
        self.dtypes = tuple(results.values())
        self.y_dtype = TORCH_DTYPES[mode.dtype_out]
        self.sum_dtypes = tuple(dtype for row, dtype in results.items() if row.name in SUMS)
        self.saves_mean = any(row.name == "mean" and dtype is not None for row, dtype in results.items())
        fp8 = {"x": mode.dtype_in, "y": mode.dtype_out}
        self.as_bytes = frozenset(name for name, dtype in fp8.items() if _in_software(dtype, self._target))

        anywhere = {row.slot for row in family.inputs if not row.is_read_in_vectors}
        self._misaligned = misaligned = {*misaligned} - anywhere
        self._itemsizes = [d.itemsize for row, d in inputs.items() if row.kind is Kind.ROWS and d is not None]
        self._numbers = dict.fromkeys((row.slot for row in family.parameters if row.kind is Kind.NUMBER), "fp32")
        self._strides = _row_strides(family, call)
        self._alignment = row_alignment(*self._strides.values())
        self._scale_strides = _scale_strides(family, call)
        dtypes = {row.slot: self._handed(row.name, dtype) for row, dtype in inputs.items()}
        dtypes |= {row.slot: self._handed(row.name, dtype) for row, dtype in results.items()}
        self._pointers = {
            name: None if dtype is None else pointer_type(dtype, aligned=name not in {*misaligned, *anywhere})
            for name, dtype in dtypes.items()
        }
        steps = {**self._strides, **self._scale_strides}
        self.extents = _extents(inputs, results, steps, n) if family.places else Extents()

    def prepared(self, m: int) -> Prepared:
        """The kernels for m rows; the first call of each class of M compiles them."""
        size = 0 if m <= self._small_m else 1 if m <= MOST_ROWS_IN_I32 else 2
        return self._prepared[size] or self._prepare(size, m)

    def _handed(self, name: str, dtype: torch.dtype | None) -> torch.dtype | None:
        """The type by which the kernels that walk the rows know a tensor."""
        if dtype is not None and name in SUMS:
            return torch.float32
        return torch.uint8 if name in self.as_bytes else dtype

    def _prepare(self, size: int, m: int) -> Prepared:
        mode, n, target = self.mode, self.n, self._target
        choices = self._entry.choices(m, target.arch)
        tile, strides = choose(mode, choices, n, target), self._strides
        if mode.is_backward:
            is_paired = pipelines.is_paired(n, self._alignment, self._misaligned)
            tile = staged(tile, choices[-1], n, self._itemsizes, is_paired, target)
        row = pipelines.row_of(mode, tile.pipeline)
        if takes_window(mode, tile, n, strides, self._misaligned):
            row, strides = pipelines.WINDOW, {"row_stride": strides["x_row_stride"]}
            tile = window_tile(mode, tile, n, few=size == 0)
        exchange = None if row.exchange is None else row.exchange(tile, n)
        types = {
            **self._pointers,
            **dict.fromkeys(row.row_terms, _PARTIAL),
            "exchange_ptr": None if exchange is None else pointer_type(torch.int64, aligned=True),
            "M": row_count_type(m),
            **self._numbers,
        }
        strides = {**strides, **self._scale_strides}
        walkers = [self._launcher(step, row, tile, types, strides) for step in row.steps]
        finisher = self._finisher() if any(self.sum_dtypes) else None
        by_address = all(launcher.launch for launcher in (*walkers, finisher) if launcher is not None)
        most, rows = row.programs(tile, n, target), tile.rows
        steps = tuple(
            Step(walker, _launch(walker, by_address), step.grid(tile, n, target))
            for walker, step in zip(walkers, row.steps, strict=True)
        )
        alone = by_address and finisher is None and exchange is None and len(steps) == 1
        found = Prepared(
            steps=steps,
            finish=None if finisher is None else Step(finisher, _launch(finisher, by_address), self._columns),
            programs=lambda m: min(most, -(-m // rows)),
            row_terms=len(row.row_terms),
            exchange=exchange,
            by_address=by_address,
            grid=steps[0].grid,
            launch=steps[0].launch if alone else None,
        )
        self._prepared[size] = found
        return found

    def _launcher(
        self,
        step: pipelines.Step,
        row: pipelines.Row,
        tile: Tile,
        types: Mapping[str, str | None],
        strides: Mapping[str, RowStride],
    ) -> Launcher:
        chunked = replace(tile, block=step.block(tile))
        constants = {
            **pipelines.constants(chunked, self.n, self._alignment, self._misaligned, self._target),
            **row.constants(tile, self.n),
        }
        options = pipelines.compiler_options(row.options, tile, self._target)
        kernel = self._entry.load(step.part or tile.pipeline)
        return Launcher(kernel, types, strides, constants, tile.warps, options, self._target, self._launches_on)

    @property
    def _summing(self) -> Summing:
        return _SUMMING if self._target.compiles else _INTERPRETED_SUMMING

    def _columns(self, m: int, programs: int = 1) -> Grid:
        return -(-self.n // self._summing.block), len(SUMS), 1

    def _finisher(self) -> Launcher:
        wanted = tuple(zip(SUMS, self.sum_dtypes, strict=True))
        partials = {f"{name}_partials_ptr": None if dtype is None else _PARTIAL for name, dtype in wanted}
        gradients = {
            f"{name}_ptr": None if dtype is None else pointer_type(dtype, aligned=True) for name, dtype in wanted
        }
        summing, target = self._summing, self._target
        constants = {"N": self.n, "ROWS": summing.rows, "BLOCK": summing.block, "PDL": target.launches_early}
        types = {**partials, **gradients, "programs": integer_type(0)}
        kernel = self._entry.load_finaliser()
        return Launcher(kernel, types, {}, constants, summing.warps, {}, target, self._launches_on)

    def _lay_out(self, m: int) -> Layout:
        ready = self.prepared(m)
        programs, finish = ready.programs(m), ready.finish
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
            finish=None if finish is None else (finish.launch, finish.grid(m, programs)),
            programs=programs,
            starts=tuple(starts),
            offsets=tuple(0 if start is None else start * torch.float32.itemsize for start in starts),
            length=length,
            exchange=0 if ready.exchange is None else ready.exchange(m),
            by_address=ready.by_address,
        )


def _launch(launcher: Launcher, by_address: bool) -> Launch:
    return launcher.launch if by_address and launcher.launch is not None else launcher.launch_tensors


def _dtype_of_input(row: Parameter, call: Call) -> torch.dtype | None:
    if row.kind is Kind.PER_ROW:
        # Autograd's are one argument, in one tensor; kernels read two.
        return torch.float32 if row.is_wanted(call.mode) else None
    tensor: torch.Tensor | None = getattr(call, row.name)
    return None if tensor is None else tensor.dtype


def _row_strides(family: Family, call: Call) -> dict[str, RowStride]:
    """The strides of rows by their slots; 0 of what is not there, and N of what is new."""
    places = {row.result: row.name for row in family.places}
    samples = {row.name for row in family.inputs if row.kind is Kind.SAMPLES}
    slots = [(row.row_stride_slot, row.name, 0) for row in family.inputs]
    for row in family.results:
        slots.append((row.row_stride_slot, places.get(row.name, ""), call.n if row.is_wanted(call.mode) else 0))
    strides: dict[str, RowStride] = {}
    for slot, name, absent in slots:
        if slot is not None:
            tensor: torch.Tensor | None = getattr(call, name, None)
            strides[slot] = absent if tensor is None else row_stride(name, tensor)
            if tensor is not None and name in samples:
                strides[slot] = sample_stride(name, tensor, call.x)
    return strides


def _scale_strides(family: Family, call: Call) -> dict[str, int]:
    """How far a row's value is from the next one's, by slots, of what has one a row or one for all."""
    scales = [(row.scale_stride_slot, getattr(call, row.name)) for row in family.inputs if row.kind is Kind.SCALE]
    return {slot: int(scale.numel() != 1) for slot, scale in scales if slot is not None and scale is not None}


def _extents(
    inputs: Mapping[Parameter, torch.dtype | None],
    results: Mapping[Result, torch.dtype | None],
    strides: Mapping[str, RowStride],
    n: int,
) -> Extents:
    def extent(row: Parameter | Result, dtype: torch.dtype) -> Extent:
        if isinstance(row, Parameter) and row.scale_stride_slot is not None:
            return extent_of(strides[row.scale_stride_slot], 1, dtype.itemsize)
        return extent_of(strides.get(row.row_stride_slot or "", 0), n, dtype.itemsize)

    written = {row.name: extent(row, dtype) for row, dtype in results.items() if dtype is not None}
    return Extents(
        inputs=tuple(
            (place, *extent(row, dtype), row.name in REPLACEABLE)
            for place, (row, dtype) in enumerate(inputs.items())
            if dtype is not None
        ),
        y=written["y"],
        total=written.get("residual_out", (0, 0)),
    )


# Formats that NVIDIA hardware of compute capability 8.9 and up converts to in one rounding, and from. Everywhere else,
# and in the interpreter, kernels are handed bytes, and encode and decode in integer arithmetic.
_HARDWARE_FP8 = (DType.FP8_E4M3FN, DType.FP8_E5M2)


def _in_software(dtype: DType, target: Target) -> bool:
    return dtype.is_fp8 and not (dtype in _HARDWARE_FP8 and target.converts_to_fp8)
