"""The kernels of GroupNorm, forward and backward, for a kind of call: made ready once, and launched."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..call_kinds import CallKind
from ..codegen.groups import GroupMode
from ..codegen.instance import Tile
from ..codegen.tiling import WARP, power_of_two
from ..codegen.values import Pipeline
from ..kernels import pipelines
from ..kernels.assembly import SUMS, Recipe, finisher_of
from ..kernels.gpu import Target, target_of
from ..kernels.group_tiles import Cut, Shape, choose
from ..kernels.key import integer_type, pointer_type
from ..kernels.launcher import Launcher, new_exchange
from ..kernels.strides import kind_of, row_alignment
from ..kernels.tile_choice import refuse_variant
from ..selection import dispatch
from ..upstream.torch_allocator import Empty, allocator
from ..upstream.triton_launcher import Grid, Launch
from .known_backward import addresses_of
from .plan import launch_of, launcher_of

# Pointers, in the order in which launches bring them; then numbers. The last are what kernels leave for one another.
FORWARD = ("x", "weight", "bias", "y", "mean", "rstd", "partials", "exchange")
BACKWARD = ("dy", "x", "weight", "bias", "mean", "rstd", "dx", "dweight", "dbias", "partials")
# What kernels leave for one another, or for sums.
_WORK = {"partials": torch.float32, "exchange": torch.int64, "dweight": torch.float32, "dbias": torch.float32}
_KINDS = {False: 4, True: 2}
# How many numbers of samples a plan keeps the launches of.
_LAYOUTS = 64
_STATISTICS = ("mean", "rstd")
# Of a grid's first dimension.
_MOST_ITEMS = 2**31 - 1

Dtypes = tuple["torch.dtype | None", ...]


class Kind(NamedTuple):
    """What launches that share their kernels are alike in.

    Attributes:
        mode: theirs.
        channels: of x.
        groups: of a sample.
        positions: of a channel.
        dtypes: of the tensors in the order of `FORWARD` or `BACKWARD`, None of those that are not there.
        misaligned: which pointers, by their slots, are at no multiple of 16 bytes.
    """

    mode: GroupMode
    channels: int
    groups: int
    positions: int
    dtypes: Dtypes
    misaligned: frozenset[str]

    @classmethod
    def forward(
        cls,
        mode: GroupMode,
        size: tuple[int, int, int],
        dtypes: Mapping[str, torch.dtype | None],
        y_dtype: torch.dtype,
        misaligned: Collection[str],
        *,
        saves: bool,
    ) -> Kind:
        """Of calls with "x", "weight" and "bias" of some types, some of them misaligned, that save statistics or not.

        The size is channels, groups and positions.
        """
        saved = dict.fromkeys(_STATISTICS if saves else (), torch.float32)
        return cls._of(mode, size, {**dtypes, "y": y_dtype, **saved}, misaligned)

    @classmethod
    def backward(
        cls,
        mode: GroupMode,
        size: tuple[int, int, int],
        dtypes: Mapping[str, torch.dtype | None],
        due: Collection[str],
        misaligned: Collection[str],
    ) -> Kind:
        """Likewise, with "dy", where dx and those of "dweight" and "dbias" that are `due` are computed."""
        # Where y is not activated, bias is of no use.
        read = {name: dtype for name, dtype in dtypes.items() if name != "bias" or mode.activation.is_applied}
        written = {"dx": dtypes["x"], **dict.fromkeys((*_STATISTICS, *due), torch.float32)}
        return cls._of(mode, size, read | written, [name for name in misaligned if name in read])

    @classmethod
    def _of(
        cls,
        mode: GroupMode,
        size: tuple[int, int, int],
        dtypes: Mapping[str, torch.dtype | None],
        misaligned: Collection[str],
    ) -> Kind:
        ordered = tuple([dtypes.get(name) for name in (BACKWARD if mode.is_backward else FORWARD)])
        # rstd starts behind the means of all groups.
        slots = frozenset([f"{name}_ptr" for name in (*misaligned, "rstd")])
        return cls(mode, *size, ordered, slots)

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the tensors."""
        return BACKWARD if self.mode.is_backward else FORWARD

    @property
    def shape(self) -> Shape:
        """What counts for tiles."""
        return Shape(self.channels, self.groups, self.positions, self.mode.dtype_in.itemsize)

    def told(self, size: int) -> CallKind:
        """The kind of call, its groups of one of `ROWS`, in plain words."""
        sizes = {"channels": self.channels, "groups": self.groups, "positions": self.positions}
        dtypes = dict(zip(self.names, self.dtypes, strict=True))
        return kind_of(self.mode.name, sizes, size, dtypes, {}, self.misaligned)


@dataclass(frozen=True)
class Prepared:
    """The kernels for one class of how many groups there are.

    Attributes:
        tile: how they run.
        cut: how x is cut.
        launchers: in order.
        teams: how many share the items; 0 where none wait for one another.
        units: what kernels are told of the positions.
    """

    tile: Tile
    cut: Cut
    launchers: tuple[Launcher, ...]
    teams: int
    units: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How the kernels are launched for one number of samples.

    Attributes:
        steps: how each launch is made, in order: its grid, and the numbers that kernels are told besides eps.
        length: fp32 values that the kernels of several parts leave for one another.
        exchange: how many int64 the programs exchange values through.
        to_rstd: bytes from the means of all groups to their rstd.
        sums: how many rows of partial sums of channels a backward launch leaves.
        by_address: whether launches take addresses, and not tensors.
    """

    steps: tuple[tuple[Launch, Grid, tuple[int, int, int, int]], ...]
    length: int
    exchange: int
    to_rstd: int
    sums: int
    by_address: bool


class GroupPlan:
    """The kernels of a kind of launches."""

    def __init__(self, kind: Kind, target: Target, device: torch.device | None) -> None:
        """Find the instance that serves a kind; with no device, kernels are known and not compiled."""
        self.kind, self.target, self._device = kind, target, device
        self.shape = kind.shape
        self.entry = dispatch.find(kind.mode, self.shape.group_length)
        self.empty: Empty = allocator(device or torch.device("cpu"))
        self._prepared: dict[int, Prepared] = {}
        self.layout = lru_cache(_LAYOUTS)(self._lay_out)
        self.finisher = lru_cache(None)(self._finisher)

    def prepared(self, samples: int) -> Prepared:
        """The kernels for so many samples."""
        size = self.entry.size(samples * self.kind.groups)
        if size not in self._prepared:
            self._prepared[size] = self._prepare(size, samples)
        return self._prepared[size]

    def _prepare(self, size: int, samples: int) -> Prepared:
        kind, shape, target = self.kind, self.shape, self.target
        choices = self.entry.choices(samples * kind.groups, shape.group_length, target.arch)
        tile, cut = choose(kind.mode, shape, choices, target)
        if self.entry.is_invariant:
            refuse_variant(kind.mode, tile, shape.group_length, samples * kind.groups)
        if self._device is not None:
            dispatch.tell(lambda: kind.told(size))
        alone = cut.parts == 1
        alignment = 1 if kind.mode.channels_last else row_alignment(shape.positions)
        types: dict[str, str | None] = {
            f"{name}_ptr": None if dtype is None else pointer_type(dtype, aligned=f"{name}_ptr" not in kind.misaligned)
            for name, dtype in zip(kind.names, kind.dtypes, strict=True)
        }
        for name in ("partials", "exchange"):
            if name in kind.names:
                types[f"{name}_ptr"] = pointer_type(_WORK[name], aligned=True)
        types["units"] = integer_type(shape.group_length)
        types |= {"first_item": "i32", "part_tiles": "i32", "items": "i32", "eps": "fp32"}
        constants = {
            "C": kind.channels,
            "CHANNELS": shape.group_channels,
            "WIDTH": cut.width,
            "BLOCK_C": cut.block_c,
            "BLOCK_S": cut.block_s,
            "HELD": cut.held,
            "ALIGNMENT": alignment,
            "FULL": cut.is_full(shape.positions),
            "ALIKE": cut.is_alike(shape.positions),
            "PTX": target.is_nvidia and target.compiles,
            "PEERS": 1 if alone else max(WARP, power_of_two(cut.parts)),
            "STAGES": tile.stages,
            "PDL": target.launches_early,
        }
        spreads = tile.pipeline is Pipeline.SPREAD
        parts = kind.mode.parts(tile.pipeline)
        options = pipelines.compiler_options(pipelines.COOPERATIVE if spreads else {}, tile, target)
        launchers = tuple(
            Launcher(self.entry.load(part), types, {}, constants, tile.warps, options, target, self._device)
            for part in (parts[-1:] if alone else parts)
        )
        teams = max(1, target.multiprocessors * tile.resident // cut.parts) if spreads else 0
        return Prepared(tile, cut, launchers, teams, shape.positions // alignment)

    def _lay_out(self, samples: int) -> Layout:
        ready, kind = self.prepared(samples), self.kind
        cut, groups = ready.cut, samples * kind.groups
        items = samples * kind.channels // cut.width
        by_address = all(launcher.launch is not None for launcher in ready.launchers)
        launches = [launch_of(launcher, by_address) for launcher in ready.launchers]
        steps: list[tuple[Launch, Grid, tuple[int, int, int, int]]]
        if ready.teams:
            steps = [(launches[0], (cut.parts, min(ready.teams, items), 1), (ready.units, 0, 0, items))]
        else:
            steps = [
                (launch, (min(_MOST_ITEMS, items - first), cut.parts, 1), (ready.units, first, cut.part_tiles, 0))
                for first in range(0, items, _MOST_ITEMS)
                for launch in launches
            ]
        in_parts = ready.tile.pipeline is Pipeline.TWO_PASS and len(launches) > 1
        sums = samples * cut.parts
        if cut.width > cut.block_c:
            tiles = -(-self.shape.positions // cut.block_s)
            sums = samples * (tiles // cut.held if cut.is_alike(self.shape.positions) else tiles)
        return Layout(
            steps=tuple(steps),
            length=groups * _KINDS[kind.mode.is_backward] * cut.parts if in_parts else 0,
            exchange=groups * cut.parts if ready.teams else 0,
            to_rstd=groups * torch.float32.itemsize,
            sums=sums,
            by_address=by_address,
        )

    def launch(
        self,
        layout: Layout,
        before: Sequence[torch.Tensor | None],
        statistics: torch.Tensor | None,
        behind: Sequence[torch.Tensor | None],
        eps: float,
    ) -> None:
        """Launch the kernels.

        Args:
            layout: the layout of as many samples.
            before: the tensors before the statistics, in the order of `FORWARD` or `BACKWARD`.
            statistics: a mean and rstd of each group, (2, samples, groups); None for none.
            behind: the tensors behind the statistics.
            eps: added to the variance.
        """
        # Allocated until the launches are in the stream, whose order keeps the memory until they have run.
        work = None
        if layout.length:
            work = self.empty((layout.length,), (1,), torch.float32)
        elif layout.exchange:
            work = new_exchange(self.empty, layout.exchange)
        values: tuple[Any, ...]
        shared: Any
        if layout.by_address:
            mean = 0 if statistics is None else statistics.data_ptr()
            rstd = mean + layout.to_rstd if mean else 0
            values = (*addresses_of(before), mean, rstd, *addresses_of(behind))
            shared = 0 if work is None else work.data_ptr()
        else:
            values = (*before, *((None, None) if statistics is None else statistics), *behind)
            # Stands for what a kernel does not name.
            shared = values[0] if work is None else work
        # Of the two, forward, a pipeline has one.
        values = (*values, shared) if self.kind.mode.is_backward else (*values, shared, shared)
        for launch, grid, numbers in layout.steps:
            launch(grid, (*values, *numbers, eps))

    def finish(
        self, rows: int, partials: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Add up rows of what a backward launch left of dweight and dbias, in a fixed order."""
        absent = (None,) * (len(SUMS) - len(gradients))
        launcher, recipe = self.finisher((*[None if each is None else each.dtype for each in gradients], *absent))
        tensors = (*partials, *absent, *gradients, *absent)
        grid = recipe.grid(rows)
        if launcher.launch is not None:
            launcher.launch(grid, (*addresses_of(tensors), rows))
        else:
            launcher.launch_tensors(grid, (*tensors, rows))

    def _finisher(self, dtypes: Dtypes) -> tuple[Launcher, Recipe]:
        """The kernel that adds up partial sums of gradients of some types, in the order of `SUMS`."""
        sums = {
            name: None if dtype is None else pointer_type(dtype, aligned=True)
            for name, dtype in zip(SUMS, dtypes, strict=True)
        }
        recipe = finisher_of(self.kind.channels, sums, self.target)
        if self._device is not None:
            words = {name: str(dtype).removeprefix("torch.") for name, dtype in zip(SUMS, dtypes, strict=True) if dtype}
            dispatch.tell(lambda: replace(self.kind.told(0), rows="", sums=tuple(words.items())))
        return launcher_of(self.entry, recipe, self.target, self._device), recipe

    @property
    def plans(self) -> list[GroupPlan]:
        """Itself, as the one plan of a kind of call that is known."""
        return [self]


def plan_of(kind: Kind, device: torch.device) -> GroupPlan:
    """The plan of a kind of launches on a device."""
    plans, key = dispatch.plans, ("group", kind, device)
    found: tuple[GroupPlan, ...] = plans.get(key, ())
    if not found:
        found = (GroupPlan(kind, target_of(device), device),)
        dispatch.remember(plans, key, found)
    return found[0]
