"""Define what is measured: modes, row lengths, and the tiles that make each pipeline serve them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, product
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import yaml

from normforge.codegen import prose
from normforge.codegen.groups import GroupMode, Span, group_modes
from normforge.codegen.instance import ANY, Tile
from normforge.codegen.model import Mode
from normforge.codegen.tile_limits import may_cut
from normforge.codegen.tiling import class_of
from normforge.codegen.values import Direction, DType, FusedAdd, Norm, Part, Pipeline
from normforge.kernels.gpu import named_target, target_of
from normforge.kernels.group_tiles import Shape, channel_tile, cut
from normforge.kernels.group_tiles import choose as choose_of_groups
from normforge.kernels.pipelines import choose
from normforge.selection import on_demand

from ..cases import FULL

# GroupNorm's, of a sample; rows of a kind come in multiples of it.
GROUPS = 4

# One row's error is luck, ours and torch's: the ratio of the largest of four moves by a half from seed to
# seed, of one row's by four. Where a card makes them cheap there are more, together still a few rows to a tile.
_ROWS_OF_A_KIND, _SHORT_ROWS_OF_A_KIND = 4, 16
_LONGEST_SHORT = 16384

M = TypeVar("M", Mode, GroupMode)
_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())


class Layout(Enum):
    """How rows lie in memory, or what they share a launch with; the value is what names and reports call it."""

    ADJOINING = ""
    HEADS = "heads"
    HEADS_IN_PLACE = "heads in place"
    TOGETHER = "two norms at once"
    ROTATED = "rotated heads"
    CHANNELS = "channels"


@dataclass(frozen=True)
class Measured(Generic[M]):
    """One launch to measure.

    Attributes:
        mode: what is computed.
        n: row length; of GroupNorm, how many elements a group has.
        tile: how; it serves every M, so that few rows can be measured with a tile for many.
        layout: how rows of x lie, and backward those of dy, and what else is in the launch.
    """

    mode: M
    n: int
    tile: Tile
    layout: Layout = Layout.ADJOINING

    @property
    def name(self) -> str:
        """For messages: the mode, N, the tile and the layout."""
        return f"{self.mode.name} N={self.n} {self.tile_name} {self.layout.value}".rstrip()

    @property
    def tile_name(self) -> str:
        """The tile's fields."""
        return " ".join(str(value) for value in self.tile.row)

    def rows_of_a_kind(self, device: torch.device) -> int:
        """How many rows of each kind a case draws."""
        many = device.type == "cuda" and self.n <= _LONGEST_SHORT
        return _SHORT_ROWS_OF_A_KIND if many else _ROWS_OF_A_KIND


class Case(Measured[Mode]):
    """A launch of rows."""

    @property
    def dtypes(self) -> str:
        """X's type and y's, and what else there is, in words."""
        mode = self.mode
        before = " before" * mode.gating.is_before
        more = {
            "dropout": mode.dropout,
            "statistics alone": mode.statistics_only,
            "add": mode.fadd.is_before,
            "add behind": self.adds_behind,
            "norms around an add": mode.fadd.renorms,
            f"{mode.gate_activation.value} gate{before}": mode.gating.gates,
            "rounded first": mode.cast.comes_first,
            self.layout.value: self.layout.value,
        }
        dtypes = " → ".join(dict.fromkeys((mode.dtype_in.value, mode.dtype_out.value)))
        return ", ".join((dtypes, *(word for word, holds in more.items() if holds)))

    @property
    def centres(self) -> bool:
        """Return True if the mean of a row is subtracted."""
        return self.mode.norm.centres

    @property
    def averages(self) -> bool:
        """Return True if the squares of a row are averaged, and not added up."""
        return self.mode.norm.averages

    @property
    def behind(self) -> Case:
        """Of norms around an add, the first with its add, whose sum is y."""
        mode = replace(self.mode, fadd=FusedAdd.POST_ADD, dtype_out=self.mode.dtype_in)
        return Case(mode, self.n, self.tile, self.layout)

    @property
    def adds_behind(self) -> bool:
        """Return True if the residual is added to normalised rows."""
        return self.mode.fadd.is_after

    @property
    def parts(self) -> tuple[Pipeline | Part, ...]:
        """The kernels that run, unless heads are rotated."""
        sweeps = self.mode.is_backward and self.tile.pipeline is Pipeline.TWO_PASS
        return (self.tile.pipeline, *((Part.ROW_TERMS,) if sweeps else ()))


class GroupCase(Measured[GroupMode]):
    """A launch of GroupNorm: each row of a kind is a group, its channels and positions side by side."""

    centres, averages, adds_behind = True, True, False

    @property
    def dtypes(self) -> str:
        """X's type, and what else there is, in words."""
        return ", ".join((self.mode.dtype_in.value, *prose.features(self.mode)))

    @property
    def channels(self) -> int:
        """The number of channels per group."""
        return next(channels for channels in (8, 4, 2, 1) if self.n % channels == 0)

    @property
    def shape(self) -> Shape:
        """The shape of x that tiles depend on."""
        return Shape(GROUPS * self.channels, GROUPS, self.n // self.channels, self.mode.dtype_in.itemsize)

    @property
    def parts(self) -> tuple[Pipeline | Part, ...]:
        """The kernels that run: where a tile gives a program whole groups, no other kernel prepares the last one."""
        parts, found = self.mode.parts(self.tile.pipeline), cut(self.mode, self.shape, self.tile)
        return parts[-1:] if found.parts == 1 and found.width % self.channels == 0 else parts

    def shaped(self, rows: torch.Tensor) -> torch.Tensor:
        """(M, N) rows as x: (samples, channels, positions)."""
        x = rows.view(-1, GROUPS * self.channels, self.n // self.channels)
        return x.movedim(1, -1).contiguous().movedim(-1, 1) if self.mode.channels_last else x


AnyCase = Case | GroupCase


def _modes(kind: str, norms: Sequence[str], named: Callable[[str], M]) -> dict[Direction, tuple[M, ...]]:
    """Return the modes of a kind by direction: of norms by their words in names, and by what makes one of a name."""
    return {
        Direction(way): tuple(named(f"{norm}_{way}_{rest}") for norm, rest in product(norms, names))
        for way, names in _TABLE["modes"][kind].items()
    }


MODES, CAST_MODES, BESIDE_MODES, _HEAD_MODES = (
    _modes(kind, [norm.prefix for norm in FULL], Mode.from_name)
    for kind in ("plain", "rounded_first", "beside", "heads")
)
_L2_MODES = _modes("l2", (Norm.L2.prefix,), Mode.from_name)
_CHANNEL_MODES = _modes("channels", [norm.prefix for norm in (*FULL, Norm.L2)], Mode.from_name)
_TOGETHER = _modes("together", ("rms",), Mode.from_name)[Direction.FORWARD]
_ROTATED = _modes("rotated", [norm.prefix for norm in FULL], Mode.from_name)
_HEAD_LAYOUTS = {Direction.FORWARD: (Layout.HEADS, Layout.HEADS_IN_PLACE), Direction.BACKWARD: (Layout.HEADS,)}
_GROUP_MODES = _modes("groups", ("gn",), {mode.name: mode for mode in group_modes()}.__getitem__)

# What the table's own tiles are measured at, few rows', some rows' and many rows'.
LENGTHS = (100, 1024, 4096, 5137, 16384, 65536, 262144, 4194304)


def cases(device: torch.device) -> list[AnyCase]:
    """Every case that a device runs."""
    if device.type != "cuda":
        return [*forced("interpreted"), *group_cases("interpreted")]
    return list(dict.fromkeys((*forced("compiled"), *_tabled(device), *group_cases("compiled"))))


def _tabled(device: torch.device) -> Iterator[Case]:
    target = target_of(device)
    for mode, n in product(chain(*MODES.values()), LENGTHS):
        entry = on_demand.plan(mode, n)
        for m in (1, entry.small_m + 1, entry.some_m + 1):
            # Not every tile suits every length: programs that wait for one another have to run at once, and rows of an
            # odd length cannot be read in pairs, and so go to registers.
            tile, generic = choose(mode, entry.choices(m, n, target.arch), n, target), entry.tile(m, n, ANY)
            is_left = tile.stages > 1 and n % 2 == 1 and mode.is_backward
            yield Case(mode, n, generic if is_left else tile)


def _tiled(where: str, what: str) -> Iterator[tuple[Tile, int]]:
    """Yield the tiles of a direction or of groups, "interpreted" or "compiled", at each of the lengths of each."""
    for row in _TABLE["tiles"][where][what]:
        pipeline, *numbers = row["tile"]
        yield from product((Tile(Pipeline(pipeline), *numbers),), row["n"])


def forced(where: str) -> Iterator[Case]:
    """Every mode and layout with every tile, "interpreted" or "compiled", that there is a kernel for."""
    for direction in Direction:
        alone = (*MODES[direction], *CAST_MODES[direction], *BESIDE_MODES[direction], *_L2_MODES[direction])
        adjoining = product(alone, (Layout.ADJOINING,))
        heads = product(_HEAD_MODES[direction], _HEAD_LAYOUTS[direction])
        for (mode, layout), (tile, n) in product((*adjoining, *heads), _tiled(where, direction.value)):
            if runs(mode, tile, n):
                yield Case(mode, n, tile, layout)
        for mode, (tile, n) in product(_ROTATED[direction], _tiled(where, "rotated")):
            yield Case(mode, n, tile, Layout.ROTATED)
        for mode, n in product(_CHANNEL_MODES[direction], _TABLE["channels"]):
            over = GroupMode(mode.dtype_in, direction, span=Span.over(mode.norm))
            yield Case(mode, n, channel_tile(over, n), Layout.CHANNELS)
    for mode, (tile, n) in product(_TOGETHER, _tiled(where, "fwd")):
        # Windows of rows of odd lengths share no launch.
        if runs(mode, tile, n) and tile.pipeline.takes_rows_alike and n % 2 == 0:
            yield Case(mode, n, tile, Layout.TOGETHER)


def runs(mode: Mode, tile: Tile, n: int) -> bool:
    """Return True if a mode has a kernel for a tile and rows of n."""
    if tile.pipeline is Pipeline.ROWS and tile.block < n and not may_cut(class_of(mode)):
        return False
    if tile.held and tile.pipeline is Pipeline.TWO_PASS and not mode.streams:
        return False
    is_short = mode.dtype_in.itemsize <= DType.FP16.itemsize
    return tile.pipeline in mode.pipelines and (tile.pipeline is not Pipeline.SPREAD or mode.is_backward or is_short)


def group_cases(where: str) -> Iterator[GroupCase]:
    """Every mode of GroupNorm with every tile that there is a kernel for and that its groups fit."""
    for mode, (tile, n) in product(chain(*_GROUP_MODES.values()), _tiled(where, "groups")):
        case, has_kernel = GroupCase(mode, n, tile), tile.pipeline in mode.pipelines
        if has_kernel and choose_of_groups(mode, case.shape, (tile,), named_target("sm_90"))[0] == tile:
            yield case
