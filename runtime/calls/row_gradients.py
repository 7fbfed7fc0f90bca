"""The kernels of a backward pass whose rows are in parts: of a sample, or of a group of columns.

Rows of a part share a modulation, or a group's weight. Each program takes some of a part's, and leaves sums of its own,
which a last kernel adds up in a fixed order. What one family of norms launches is a row of data, its `Tensors`: see
`modulated_backward` and `gated_backward`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..codegen.instance import Tile
from ..codegen.model import Mode
from ..dtypes import FLOATS
from ..kernels import pipelines
from ..kernels.assembly import SUMS, finisher_of
from ..kernels.gpu import Target, target_of
from ..kernels.key import pointer_type, row_count_type
from ..kernels.kinds import kind_of as call_kind_of
from ..kernels.launcher import Launcher
from ..kernels.row_walk import RowStride
from ..kernels.tile_choice import choose, refuse_variant, staged
from ..selection import dispatch
from ..upstream.torch_allocator import allocator
from ..upstream.torch_internals import has_tangent
from ..upstream.triton_launcher import Grid, Launch
from .known import MISALIGNED, PLAIN
from .outputs import aligned_length

_TERMS = ("gh_mean", "g_mean")

Dtypes = tuple["torch.dtype | None", ...]


class Tensors(NamedTuple):
    """What launches of one family bring.

    Attributes:
        names: of the tensors, in order.
        with_rows: those that have rows.
        read: of these, those that a loop over rows reads.
        sums: what kernels leave for each program, three at most.
        shared: what kernels call the number that says which rows share a sum: rows a sample, or groups.
    """

    names: tuple[str, ...]
    with_rows: tuple[str, ...]
    read: tuple[str, ...]
    sums: tuple[str, ...]
    shared: str


class Kind(NamedTuple):
    """What launches that share their kernels are alike in.

    Attributes:
        mode: theirs.
        tensors: what they bring.
        n: row length.
        dtypes: of the tensors, None of those that are not there; then of what the sums add up to.
        strides: of those that have rows, in elements; 0 where there are none.
        misaligned: which pointers, by their slots, are at no multiple of 16 bytes.
    """

    mode: Mode
    tensors: Tensors
    n: int
    dtypes: Dtypes
    strides: tuple[RowStride, ...]
    misaligned: frozenset[str]


@dataclass(frozen=True)
class Prepared:
    """The kernels for one class of M.

    Attributes:
        row: how they are launched.
        tile: with which.
        walkers: that take rows, in order.
        finisher: that adds up what those leave, if they leave sums.
        blocks: how many programs of that one share a row.
    """

    row: pipelines.Row
    tile: Tile
    walkers: tuple[Launcher, ...]
    finisher: Launcher | None
    blocks: int

    @property
    def launchers(self) -> tuple[Launcher, ...]:
        """All, in order."""
        return self.walkers if self.finisher is None else (*self.walkers, self.finisher)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the kernels are launched for one M and so many parts, and what lies where in the memory that they share.

    Attributes:
        steps: how the kernels that walk the rows are launched, in order, and their grids.
        finish: the same of what adds up their partial sums; None where there are none.
        programs: how many share the rows of a part.
        starts: where the partial sums of each sum start, in fp32 elements, and then each of the values that the first
            step leaves for the next; None of what is not wanted.
        offsets: the same in bytes.
        length: of that memory, in elements.
        by_address: whether launches take addresses, and not tensors.
    """

    steps: tuple[tuple[Launch, Grid], ...]
    finish: tuple[Launch, Grid] | None
    programs: int
    starts: tuple[int | None, ...]
    offsets: tuple[int | None, ...]
    length: int
    by_address: bool


# How many M, and numbers of parts, a plan keeps the layouts of.
_LAYOUTS = 64


class GradientPlan:
    """The kernels of a kind of launches, for each class of M.

    Attributes:
        kind: what launches are alike in.
        empty: makes tensors on the device; a plan of kernels that are only known is not launched.
        layout: from M and the number of parts to the `Layout` of launches.
    """

    def __init__(self, kind: Kind, target: Target, device: torch.device | None) -> None:
        """Find the instance that serves a kind; with no device, kernels are known and not compiled."""
        self.kind, self._target, self._device = kind, target, device
        self._entry = dispatch.find(kind.mode, kind.n)
        self._prepared: dict[int, Prepared] = {}
        self.empty = allocator(device or torch.device("meta"))
        self.layout = lru_cache(_LAYOUTS)(self._lay_out)

    def prepared(self, m: int) -> Prepared:
        """The kernels for m rows."""
        size = self._entry.size(m)
        if size not in self._prepared:
            self._prepared[size] = self._prepare(size, m)
        return self._prepared[size]

    def _prepare(self, size: int, m: int) -> Prepared:
        (mode, tensors, n, dtypes, strides, misaligned), target = self.kind, self._target
        choices, invariant = self._entry.choices(m, n, target.arch), self._entry.is_invariant
        if invariant:
            misaligned = frozenset(() if pipelines.starts_aligned(n) else [f"{name}_ptr" for name in tensors.with_rows])
        tile = choose(mode, choices, n, target)
        alignment = pipelines.row_alignment(*([n] if invariant else strides))
        told = dict(zip((*tensors.names, *tensors.sums), dtypes, strict=True))
        read = [dtype.itemsize for dtype in map(told.get, tensors.read) if dtype is not None]
        is_paired = pipelines.is_paired(n, alignment, misaligned)
        tile = staged(tile, choices[-1], n, read, is_paired, target)
        row = pipelines.row_of(mode, tile.pipeline)
        if invariant:
            refuse_variant(mode, tile, n, m)
        single = pointer_type(torch.float32, aligned=True)
        types: dict[str, str | None] = {
            f"{name}_ptr": None if dtype is None else pointer_type(dtype, aligned=f"{name}_ptr" not in misaligned)
            for name, dtype in zip(tensors.names, dtypes, strict=False)
        }
        types |= {f"{name}_ptr": None if told[name] is None else single for name in tensors.sums}
        types |= {f"{name}_ptr": single for name in _TERMS}
        types |= dict.fromkeys(("M", tensors.shared), row_count_type(m))
        types["weight_offset"] = "fp32"
        named = {f"{name}_row_stride": stride for name, stride in zip(tensors.with_rows, strides, strict=True)}
        if self._device is not None:
            dispatch.tell(lambda: call_kind_of(mode.name, {"n": n}, size, told, named, misaligned))
        walkers = []
        for step in row.steps:
            chunked = replace(tile, block=step.block(tile))
            constants = pipelines.constants(chunked, n, alignment, misaligned, target)
            options = pipelines.compiler_options(row.options, tile, target)
            kernel = self._entry.load(step.part or tile.pipeline)
            walkers.append(Launcher(kernel, types, named, constants, tile.warps, options, target, self._device))
        if not any(self._sums.values()):
            return Prepared(row, tile, tuple(walkers), None, 0)
        made = finisher_of(n, self._sums, target, of_parts=mode.modulated or mode.grouped)
        kernel = self._entry.load_finaliser()
        finisher = Launcher(kernel, made.types, {}, made.constants, made.warps, made.options, target, self._device)
        return Prepared(row, tile, tuple(walkers), finisher, made.grid(m)[0])

    @property
    def _sums(self) -> dict[str, str | None]:
        """What the last kernel calls what sums add up to, and their types."""
        dtypes = self.kind.dtypes[len(self.kind.tensors.names) :]
        words = [None if dtype is None else pointer_type(dtype, aligned=True) for dtype in dtypes]
        return {name: words[place] if place < len(words) else None for place, name in enumerate(SUMS)}

    def _lay_out(self, m: int, parts: int) -> Layout:
        ready, (_, brought, n, dtypes, *_) = self.prepared(m), self.kind
        most = ready.row.programs(ready.tile, n, self._target)
        each = programs_a_part(most, parts, -(-(m // parts) // ready.tile.rows))
        by_address = all(launcher.launch is not None for launcher in ready.launchers)
        sums = dtypes[len(brought.names) :]
        wanted = [*[dtype is not None for dtype in sums], *[bool(ready.row.row_terms) for _ in _TERMS]]
        lengths = [*[parts * each * n for _ in sums], *[m for _ in _TERMS]]
        starts: list[int | None] = []
        length = 0
        for is_wanted, its in zip(wanted, lengths, strict=True):
            starts.append(length if is_wanted else None)
            length += aligned_length(its) if is_wanted else 0
        due = max((place for place, dtype in enumerate(sums) if dtype is not None), default=-1) + 1
        finish = None if ready.finisher is None else (_launch(ready.finisher, by_address), (ready.blocks, due, parts))
        steps = zip(ready.row.steps, ready.walkers, strict=True)
        return Layout(
            steps=tuple(
                (_launch(walker, by_address), step.grid(ready.tile, n, self._target)(m, parts * each))
                for step, walker in steps
            ),
            finish=finish,
            programs=each,
            starts=tuple(starts),
            offsets=tuple(None if start is None else start * torch.float32.itemsize for start in starts),
            length=length,
            by_address=by_address,
        )

    def launch(
        self,
        m: int,
        parts: int,
        shared: int,
        tensors: Mapping[str, torch.Tensor | None],
        weight_offset: float,
    ) -> dict[str, torch.Tensor]:
        """Launch the kernels.

        Args:
            m: rows.
            parts: how many share a sum.
            shared: which do, as the kernels are told it.
            tensors: by their names, None for those that are not there.
            weight_offset: added to weight.

        Returns:
            What the sums add up to, (parts, N), by their names.
        """
        _, brought, n, dtypes, *_ = self.kind
        totals = [
            None if dtype is None else self.empty((parts, n), (n, 1), dtype) for dtype in dtypes[len(brought.names) :]
        ]
        layout, values = self.layout(m, parts), [tensors[name] for name in brought.names]
        self.run(layout, m, shared, addresses_of(values) if layout.by_address else values, totals, weight_offset)
        return {name: total for name, total in zip(brought.sums, totals, strict=True) if total is not None}

    def run(
        self,
        layout: Layout,
        m: int,
        shared: int,
        values: Sequence[Any],
        totals: Sequence[torch.Tensor | None],
        weight_offset: float,
    ) -> None:
        """Launch them on what is there already.

        Args:
            layout: that of m, and of the parts.
            m: rows.
            shared: see `launch`.
            values: the tensors in the order of their names, as addresses if the layout says so.
            totals: where sums go, in their order; None for those that are not due.
            weight_offset: added to weight.
        """
        work = self.empty((layout.length,), (1,), torch.float32) if layout.length else None
        pieces: list[Any]
        made: Sequence[Any]
        absent: int | None
        if layout.by_address:
            base = 0 if work is None else work.data_ptr()
            pieces = [0 if offset is None else base + offset for offset in layout.offsets]
            made, absent = addresses_of(totals), 0
        else:
            pieces = [None if start is None or work is None else work[start:] for start in layout.starts]
            made, absent = totals, None
        for launch, grid in layout.steps:
            launch(grid, (*values, *pieces, m, shared, weight_offset))
        if layout.finish is not None:
            launch, grid = layout.finish
            count = len(totals)
            others = (absent,) * (len(SUMS) - count)
            launch(grid, (*pieces[:count], *others, *made, *others, layout.programs))

    @property
    def plans(self) -> list[GradientPlan]:
        """Itself, as the one plan of a kind of call that is known."""
        return [self]


# Each wave starts anew, and each program leaves sums, which takes it about as long as so many rows.
_MOST_WAVES = 4
_START = 4


def programs_a_part(most: int, parts: int, tiles: int) -> int:
    """How many programs share the tiles of a part.

    Those that the GPU runs at once make a wave, and what counts is how many tiles waves take in turn. One program more
    than a wave's is another wave: with 17 for each of 32 samples where 528 run, 16 wait until all others have ended.

    Args:
        most: programs that run at once.
        parts: of as many tiles each.
        tiles: of a part.

    Returns:
        Those with which that is the least, the fewest of them.
    """

    def taken(each: int) -> tuple[int, int]:
        return -(-parts * each // most) * (-(-tiles // each) + _START), each

    # As many as fit into each number of waves, less those without which none takes more tiles.
    most_of_each = [max(1, min(waves * most // parts, tiles)) for waves in range(1, _MOST_WAVES + 1)]
    return min((-(-tiles // -(-tiles // each)) for each in most_of_each), key=taken)


def sum_dtype(operand: torch.Tensor, parts: int) -> torch.dtype:
    """In which type to add up what parts leave of an operand: its own, or fp32 if all parts share it and are added."""
    return operand.dtype if operand.numel() == parts * operand.shape[-1] else torch.float32


def shared_sum(totals: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    """The gradient of an operand that each part has a row of, or all share, from what parts add up to."""
    return totals.view(operand.shape) if totals.numel() == operand.numel() else totals.sum(0)


def addresses_of(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """Where tensors lie, 0 for those that are not there."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _launch(launcher: Launcher, by_address: bool) -> Launch:
    return launcher.launch if by_address and launcher.launch is not None else launcher.launch_tensors


def plan_of(kind: Kind, device: torch.device) -> GradientPlan:
    """The plan of launches of a kind."""
    plans, key = dispatch.plans, ("neighbour bwd", kind, device)
    found: tuple[GradientPlan, ...] = plans.get(key, ())
    if not found:
        found = (GradientPlan(kind, target_of(device), device),)
        dispatch.remember(plans, key, found)
    return found[0]


def kind_of(
    mode: Mode,
    brought: Tensors,
    n: int,
    tensors: Mapping[str, torch.Tensor | None],
    strides: Mapping[str, RowStride],
    sums: Mapping[str, torch.dtype],
) -> Kind:
    """What launches with some tensors, and sums of these types, are alike in."""
    found = [tensors.get(name) for name in brought.names]
    dtypes = [None if tensor is None else tensor.dtype for tensor in found]
    dtypes += [sums.get(name) for name in brought.sums]
    misaligned = [
        f"{name}_ptr"
        for name, tensor in zip(brought.names, found, strict=True)
        if tensor is not None and tensor.data_ptr() & MISALIGNED
    ]
    steps = tuple([strides.get(name, 0) for name in brought.with_rows])
    return Kind(mode, brought, n, tuple(dtypes), steps, frozenset(misaligned))


def in_memory(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether kernels can read all that there is of some tensors: of none a tangent of forward-mode AD."""
    there = [tensor for tensor in tensors if tensor is not None]
    if not all(tensor.__class__ in PLAIN and tensor.dtype in FLOATS and not tensor.is_neg() for tensor in there):
        return False
    try:
        return all(tensor.data_ptr() != 0 for tensor in there) and not has_tangent(there)
    except RuntimeError:
        return False
