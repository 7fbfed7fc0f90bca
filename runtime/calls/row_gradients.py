"""The kernels of a backward pass whose programs leave sums that torch's operators add up, in a fixed order.

Of rows that share a modulation, or a group's weight, each program takes some, and leaves sums of its own. What one
family of norms launches is a row of data, its `Tensors`: see `modulated_backward` and `gated_backward`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..codegen.instance import Tile
from ..codegen.model import Mode
from ..dtypes import FLOATS
from ..kernels import pipelines
from ..kernels.gpu import Target, target_of
from ..kernels.key import MOST_ROWS_IN_I32, pointer_type, row_count_type
from ..kernels.kinds import kind_of as call_kind_of
from ..kernels.launcher import Launcher
from ..kernels.row_walk import RowStride
from ..kernels.tile_choice import choose, narrowed, refuse_variant
from ..selection import dispatch
from .known import MISALIGNED, PLAIN

_TERMS = ("gh_mean", "g_mean")

Dtypes = tuple["torch.dtype | None", ...]


class Tensors(NamedTuple):
    """What launches of one family bring.

    Attributes:
        names: of the tensors, in order.
        with_rows: those that have rows.
        sums: what kernels leave for each program.
        shared: what kernels call the number that says which rows share a sum: rows a sample, or groups.
    """

    names: tuple[str, ...]
    with_rows: tuple[str, ...]
    sums: tuple[str, ...]
    shared: str


class Kind(NamedTuple):
    """What launches that share their kernels are alike in.

    Attributes:
        mode: theirs.
        tensors: what they bring.
        n: row length.
        dtypes: of the tensors, None of those that are not there; then of the sums.
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
    """The kernels for one class of M, in order."""

    row: pipelines.Row
    tile: Tile
    launchers: tuple[Launcher, ...]


class GradientPlan:
    """The kernels of a kind of launches, for each class of M."""

    def __init__(self, kind: Kind, target: Target, device: torch.device | None) -> None:
        """Find the instance that serves a kind; with no device, kernels are known and not compiled."""
        self.kind, self._target, self._device = kind, target, device
        self._entry = dispatch.find(kind.mode, kind.n)
        self._prepared: dict[int, Prepared] = {}

    def prepared(self, m: int) -> Prepared:
        """The kernels for m rows."""
        size = 0 if m <= self._entry.small_m else 1 if m <= MOST_ROWS_IN_I32 else 2
        if size not in self._prepared:
            self._prepared[size] = self._prepare(size, m)
        return self._prepared[size]

    def _prepare(self, size: int, m: int) -> Prepared:
        (mode, tensors, n, dtypes, strides, misaligned), target = self.kind, self._target
        tile = narrowed(mode, choose(mode, self._entry.choices(m, target.arch), n, target), n)
        row = pipelines.row_of(mode, tile.pipeline)
        invariant = self._entry.is_invariant
        alignment = pipelines.row_alignment(*([n] if invariant else strides))
        if invariant:
            refuse_variant(mode, tile, n, m)
            misaligned = frozenset(() if pipelines.starts_aligned(n) else [f"{name}_ptr" for name in tensors.with_rows])
        types: dict[str, str | None] = {
            f"{name}_ptr": None if dtype is None else pointer_type(dtype, aligned=f"{name}_ptr" not in misaligned)
            for name, dtype in zip((*tensors.names, *tensors.sums), dtypes, strict=True)
        }
        term = pointer_type(torch.float32, aligned=True)
        types |= {f"{name}_ptr": term for name in _TERMS}
        types |= dict.fromkeys(("M", tensors.shared), row_count_type(m))
        types["weight_offset"] = "fp32"
        named = {f"{name}_row_stride": stride for name, stride in zip(tensors.with_rows, strides, strict=True)}
        if self._device is not None:
            told = dict(zip((*tensors.names, *tensors.sums), dtypes, strict=True))
            dispatch.tell(lambda: call_kind_of(mode.name, {"n": n}, size, told, named, misaligned))
        launchers = []
        for step in row.steps:
            chunked = replace(tile, block=step.block(tile))
            constants = pipelines.constants(chunked, n, alignment, misaligned, target)
            options = pipelines.compiler_options(row.options, tile, target)
            kernel = self._entry.load(step.part or tile.pipeline)
            launchers.append(Launcher(kernel, types, named, constants, tile.warps, options, target, self._device))
        return Prepared(row, tile, tuple(launchers))

    def programs(self, m: int, parts: int) -> int:
        """How many programs share the rows of m, as many for each sample or group: a function of M only up to its."""
        ready = self.prepared(m)
        most = ready.row.programs(ready.tile, self.kind.n, self._target)
        rows = m // parts
        return parts * max(1, min(-(-most // parts), -(-rows // ready.tile.rows)))

    def launch(self, m: int, shared: int, programs: int, values: Sequence[Any], weight_offset: float) -> None:
        """Launch the kernels, given the tensors and memory for sums, None for those that are not there.

        Args:
            m: rows.
            shared: which of them share a sum, as the kernels are told it.
            programs: how many share the rows.
            values: the tensors, in order, and where the sums go.
            weight_offset: added to weight.
        """
        ready = self.prepared(m)
        x = values[self.kind.tensors.names.index("x")]
        given: Sequence[Any] = [*values, *[x.new_empty(m, dtype=torch.float32) for _ in _TERMS]]
        values = given
        by_address = all(launcher.launch is not None for launcher in ready.launchers)
        if by_address:
            given = [0 if tensor is None else tensor.data_ptr() for tensor in values]
        for step, launcher in zip(ready.row.steps, ready.launchers, strict=True):
            grid = step.grid(ready.tile, self.kind.n, self._target)(m, programs)
            launch = launcher.launch if by_address and launcher.launch is not None else launcher.launch_tensors
            launch(grid, (*given, m, shared, weight_offset))

    @property
    def plans(self) -> list[GradientPlan]:
        """Itself, as the one plan of a kind of call that is known."""
        return [self]


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
    sums: Collection[str],
) -> Kind:
    """What launches with some tensors are alike in."""
    found = [tensors.get(name) for name in brought.names]
    dtypes = [None if tensor is None else tensor.dtype for tensor in found]
    dtypes += [torch.float32 if name in sums else None for name in brought.sums]
    misaligned = [
        f"{name}_ptr"
        for name, tensor in zip(brought.names, found, strict=True)
        if tensor is not None and tensor.data_ptr() & MISALIGNED
    ]
    steps = tuple([strides.get(name, 0) for name in brought.with_rows])
    return Kind(mode, brought, n, tuple(dtypes), steps, frozenset(misaligned))


def in_memory(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether kernels can read all tensors that there are, as they are."""
    there = [tensor for tensor in tensors if tensor is not None]
    if not all(tensor.__class__ in PLAIN and tensor.dtype in FLOATS and not tensor.is_neg() for tensor in there):
        return False
    try:
        return all(tensor.data_ptr() != 0 for tensor in there)
    except RuntimeError:
        return False
