"""Define what is measured: modes, row lengths, and the tiles that make each pipeline serve them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, product

import torch

from normforge.codegen.instance import ANY, Tile
from normforge.codegen.model import Mode
from normforge.codegen.tile_limits import may_cut
from normforge.codegen.tiling import class_of
from normforge.codegen.values import (
    Direction,
    DType,
    Part,
    Pipeline,
)
from normforge.kernels.gpu import target_of
from normforge.kernels.pipelines import choose
from normforge.selection import on_demand
from tests.norms import FULL

from .groups import GroupCase, Layout, group_cases
from .listed import modes_of, tiles_of

_NORMS = [norm.prefix for norm in FULL]
MODES, CAST_MODES, BESIDE_MODES, _HEAD_MODES = (
    modes_of(kind, _NORMS, Mode.from_name) for kind in ("plain", "rounded_first", "beside", "heads")
)
_HEAD_LAYOUTS = {
    Direction.FORWARD: (Layout.HEADS, Layout.HEADS_IN_PLACE),
    Direction.BACKWARD: (Layout.HEADS,),
}

# One row's error is luck, ours and torch's: the ratio of the largest of four moves by a half from seed to
# seed, of one row's by four. Where a card makes them cheap there are more, together still a few rows to a tile.
_ROWS_OF_A_KIND, _SHORT_ROWS_OF_A_KIND = 4, 16
_LONGEST_SHORT = 16384


def rows_of_a_kind(n: int, device: torch.device) -> int:
    """How many rows of each kind a case draws."""
    return _SHORT_ROWS_OF_A_KIND if device.type == "cuda" and n <= _LONGEST_SHORT else _ROWS_OF_A_KIND


@dataclass(frozen=True)
class Case:
    """One launch to measure.

    Attributes:
        mode: what is computed.
        n: row length.
        tile: how; it serves every M, so that few rows can be measured with a tile for many.
        layout: how rows of x lie, and backward those of dy.
    """

    mode: Mode
    n: int
    tile: Tile
    layout: Layout = Layout.ADJOINING

    @property
    def name(self) -> str:
        """For messages: the mode, N, the tile and the layout."""
        tile = " ".join(str(value) for value in self.tile.row)
        return f"{self.mode.name} N={self.n} {tile} {self.layout.value}".rstrip()

    @property
    def dtypes(self) -> str:
        """X's type and y's, and what else there is, in words."""
        mode = self.mode
        words = [" → ".join(dict.fromkeys((mode.dtype_in.value, mode.dtype_out.value)))]
        words += ["dropout"] if mode.dropout else []
        words += ["add"] if mode.fadd.adds else []
        if mode.gating.gates:
            words.append(f"{mode.gate_activation.value} gate{' before' if mode.gating.is_before else ''}")
        words += ["rounded first"] if mode.cast.comes_first else []
        words += [self.layout.value] if self.layout.value else []
        return ", ".join(words)

    @property
    def parts(self) -> tuple[Pipeline | Part, ...]:
        """The kernels that run."""
        sweeps = self.mode.is_backward and self.tile.pipeline is Pipeline.TWO_PASS
        return (self.tile.pipeline, *((Part.ROW_TERMS,) if sweeps else ()))


AnyCase = Case | GroupCase


# What the table's own tiles are measured at, few rows', some rows' and many rows'.
LENGTHS = (100, 1024, 4096, 5137, 16384, 65536, 262144, 4194304)


def cases(device: torch.device) -> list[AnyCase]:
    """Every case that a device runs."""
    compiles = device.type == "cuda"
    rows = _compiled(device) if compiles else forced("interpreted")
    return list(dict.fromkeys((*rows, *group_cases(compiles))))


def _compiled(device: torch.device) -> Iterator[Case]:
    yield from forced("compiled")
    target = target_of(device)
    for mode, n in product(chain(*MODES.values()), LENGTHS):
        entry = on_demand.plan(mode, n)
        for m in (1, entry.small_m + 1, entry.some_m + 1):
            # Not every tile suits every length: programs that wait for one another have to run at once, and rows of an
            # odd length cannot be read in pairs, and so go to registers.
            tile, generic = choose(mode, entry.choices(m, n, target.arch), n, target), entry.tile(m, n, ANY)
            is_left = tile.stages > 1 and n % 2 == 1 and mode.is_backward
            yield Case(mode, n, generic if is_left else tile)


def forced(where: str) -> Iterator[Case]:
    """Every mode and layout with every tile, "interpreted" or "compiled", that there is a kernel for."""
    for direction in Direction:
        adjoining = product((*MODES[direction], *CAST_MODES[direction], *BESIDE_MODES[direction]), (Layout.ADJOINING,))
        heads = product(_HEAD_MODES[direction], _HEAD_LAYOUTS[direction])
        for (mode, layout), (tile, lengths) in product((*adjoining, *heads), tiles_of(where, direction.value)):
            yield from (Case(mode, n, tile, layout) for n in lengths if runs(mode, tile, n))


def runs(mode: Mode, tile: Tile, n: int) -> bool:
    """Return True if a mode has a kernel for a tile and rows of n."""
    if tile.pipeline is Pipeline.ROWS and tile.block < n and not may_cut(class_of(mode)):
        return False
    if tile.held and tile.pipeline is Pipeline.TWO_PASS and not mode.streams:
        return False
    is_short = mode.dtype_in.itemsize <= DType.FP16.itemsize
    return tile.pipeline in mode.pipelines and (tile.pipeline is not Pipeline.SPREAD or mode.is_backward or is_short)


def matching(some: Iterable[AnyCase], words: Iterable[str]) -> list[AnyCase]:
    """Return the cases whose names hold every word."""
    wanted = tuple(words)
    return [case for case in some if all(word in case.name for word in wanted)]
