"""Define what is measured: modes, row lengths, and the tiles that make each pipeline serve them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import torch

from normforge.codegen.instance import ANY, Tile
from normforge.codegen.model import Mode
from normforge.codegen.tile_limits import may_cut
from normforge.codegen.tiling import class_of
from normforge.codegen.values import (
    Cast,
    Direction,
    DType,
    FusedAdd,
    FusedQuant,
    GateActivation,
    Gating,
    Part,
    Pipeline,
)
from normforge.kernels.gpu import target_of
from normforge.kernels.pipelines import choose
from normforge.selection import on_demand
from tests.norms import FULL

from .groups import GroupCase, Layout, group_cases

FP16, BF16, FP32 = DType.FP16, DType.BF16, DType.FP32
INT8, FP8 = DType.INT8, DType.FP8_E4M3FN

# (dtype of x, dtype of y).
_FORWARD_DTYPES = ((FP16, FP16), (BF16, BF16), (FP32, FP32), (FP16, FP32), (BF16, FP32))
_QUANTISED = ((FP16, FP8), (BF16, INT8), (FP32, INT8))
_BACKWARD_DTYPES = (FP16, BF16, FP32)
# What is rounded before the weight: Llama's rows to x's type, of a weight in that or in fp32; T5's fp32 rows to their
# weight's, which is y's.
_CAST_DTYPES = ((FP16, FP16), (BF16, BF16), (BF16, FP32), (FP32, BF16))
_CAST_QUANTISED = ((FP16, FP8), (BF16, INT8))

MODES = {
    Direction.FORWARD: tuple(
        mode
        for norm in FULL
        for mode in (
            *(Mode(norm, dtype, out, save_mv=True) for dtype, out in _FORWARD_DTYPES),
            *(Mode(norm, dtype, dtype, FusedAdd.PRE_ADD_STORE, save_mv=True) for dtype in (FP16, BF16)),
            *(Mode(norm, dtype, out, fquant=FusedQuant.DYNAMIC) for dtype, out in _QUANTISED),
        )
    ),
    Direction.BACKWARD: tuple(
        Mode(norm, dtype, dtype, direction=Direction.BACKWARD) for norm, dtype in product(FULL, _BACKWARD_DTYPES)
    ),
}

# What follows is measured with the tiles of each pipeline alone: it changes none of them.
_CAST = Cast.BEFORE_WEIGHT
CAST_MODES = {
    Direction.FORWARD: tuple(
        mode
        for norm in FULL
        for mode in (
            *(Mode(norm, dtype, out, save_mv=True, cast=_CAST) for dtype, out in _CAST_DTYPES),
            Mode(norm, BF16, BF16, FusedAdd.PRE_ADD_STORE, save_mv=True, cast=_CAST),
            *(Mode(norm, dtype, out, fquant=FusedQuant.DYNAMIC, cast=_CAST) for dtype, out in _CAST_QUANTISED),
        )
    ),
    Direction.BACKWARD: tuple(
        Mode(norm, dtype, dtype, direction=Direction.BACKWARD, cast=_CAST)
        for norm, dtype in product(FULL, (FP16, BF16))
    ),
}
_GATINGS = (Gating.AFTER_NORM, Gating.BEFORE_NORM)
_BACKWARD_AXES: tuple[dict[str, Any], ...] = ({"dropout": True}, *({"gating": gating} for gating in _GATINGS))
# Dropout before an add, and rows with a gate behind the norm or before it.
BESIDE_MODES = {
    Direction.FORWARD: tuple(
        mode
        for norm in FULL
        for mode in (
            *(Mode(norm, dtype, dtype, FusedAdd.PRE_ADD_STORE, dropout=True, save_mv=True) for dtype in (BF16, FP32)),
            *(
                Mode(norm, dtype, dtype, gating=gating, save_mv=True)
                for gating, dtype in product(_GATINGS, (FP16, BF16, FP32))
            ),
            Mode(norm, BF16, FP32, gating=Gating.AFTER_NORM, gate_activation=GateActivation.SIGMOID, save_mv=True),
            Mode(norm, BF16, INT8, gating=Gating.AFTER_NORM, fquant=FusedQuant.DYNAMIC),
        )
    ),
    Direction.BACKWARD: tuple(
        Mode(norm, dtype, dtype, direction=Direction.BACKWARD, **axes)
        for norm, dtype in product(FULL, (BF16, FP32))
        for axes in _BACKWARD_AXES
    ),
}
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


ROWS, ONE_PASS, TWO_PASS, SPREAD = Pipeline

# Tiles, and the row lengths that each is measured at.
Variants = Mapping[Direction, tuple[tuple[Tile, tuple[int, ...]], ...]]

# Rows of several chunks and of two, whose pivot is their first values' mean; rows that no vector starts (odd lengths,
# which `window` takes); many chunks and few; a team of one program, which is all that the interpreter can run.
INTERPRETED: Variants = {
    Direction.FORWARD: (
        (Tile(ROWS, 4, 128, 1), (100,)),
        (Tile(ROWS, 8, 32, 1), (100,)),
        (Tile(ONE_PASS, 1, 256, 2), (1001, 1016)),
        (Tile(ONE_PASS, 1, 512, 2), (1000,)),
        (Tile(ONE_PASS, 1, 8192, 32), (16384,)),
        (Tile(TWO_PASS, 1, 1024, 4), (8192,)),
        (Tile(TWO_PASS, 1, 2048, 8, held=1), (4096,)),
        (Tile(SPREAD, 1, 512, 2, held=8), (4000,)),
    ),
    Direction.BACKWARD: (
        (Tile(ROWS, 2, 128, 1), (100,)),
        (Tile(ROWS, 8, 32, 1), (100,)),
        (Tile(ONE_PASS, 1, 256, 2), (1000,)),
        (Tile(TWO_PASS, 2, 256, 2), (1000,)),
        (Tile(SPREAD, 2, 1024, 4), (1000,)),
    ),
}
# On a GPU, beside what the table says: each pipeline for each dtype, also where no table takes it.
COMPILED: Variants = {
    Direction.FORWARD: (
        (Tile(ROWS, 4, 128, 1), (100,)),
        (Tile(ROWS, 8, 32, 1), (100,)),
        (Tile(ROWS, 2, 512, 4), (2304,)),
        (Tile(ONE_PASS, 1, 1024, 4), (4096, 4099)),
        (Tile(ONE_PASS, 1, 4096, 16), (8192,)),
        (Tile(ONE_PASS, 1, 8192, 32), (16384,)),
        (Tile(TWO_PASS, 1, 1024, 4), (8192,)),
        (Tile(TWO_PASS, 1, 8192, 32), (65536,)),
        (Tile(SPREAD, 1, 512, 2, resident=4, held=8, stages=3), (70000,)),
    ),
    Direction.BACKWARD: (
        (Tile(ROWS, 2, 128, 1), (100,)),
        (Tile(ROWS, 8, 32, 1, resident=12), (100,)),
        (Tile(ONE_PASS, 1, 1024, 4), (4096,)),
        (Tile(TWO_PASS, 2, 2048, 8, resident=2), (4096, 65536)),
        (Tile(SPREAD, 4, 1024, 4, resident=3), (12288, 65536)),
    ),
}
# What the table's own tiles are measured at, few rows', some rows' and many rows'.
LENGTHS = (100, 1024, 4096, 5137, 16384, 65536, 262144, 4194304)


def cases(device: torch.device) -> list[AnyCase]:
    """Every case that a device runs."""
    compiles = device.type == "cuda"
    rows = _compiled(device) if compiles else forced(INTERPRETED)
    return list(dict.fromkeys((*rows, *group_cases(compiles))))


def _compiled(device: torch.device) -> Iterator[Case]:
    yield from forced(COMPILED)
    target = target_of(device)
    for mode, n in product(chain(*MODES.values()), LENGTHS):
        entry = on_demand.plan(mode, n)
        for m in (1, entry.small_m + 1, entry.some_m + 1):
            # Not every tile suits every length: programs that wait for one another have to run at once, and rows of an
            # odd length cannot be read in pairs, and so go to registers.
            tile, generic = choose(mode, entry.choices(m, n, target.arch), n, target), entry.tile(m, n, ANY)
            is_left = tile.stages > 1 and n % 2 == 1 and mode.is_backward
            yield Case(mode, n, generic if is_left else tile)


def forced(variants: Variants) -> Iterator[Case]:
    """Every mode and layout with every tile that there is a kernel for."""
    for direction, some in variants.items():
        adjoining = product((*MODES[direction], *CAST_MODES[direction], *BESIDE_MODES[direction]), (Layout.ADJOINING,))
        plain = [
            Mode(norm, dtype, dtype, save_mv=direction is Direction.FORWARD, direction=direction)
            for norm, dtype in product(FULL, (BF16, FP32))
        ]
        heads = product(plain, _HEAD_LAYOUTS[direction])
        for (mode, layout), (tile, lengths) in product((*adjoining, *heads), some):
            yield from (Case(mode, n, tile, layout) for n in lengths if runs(mode, tile, n))


def runs(mode: Mode, tile: Tile, n: int) -> bool:
    """Return True if a mode has a kernel for a tile and rows of n."""
    if tile.pipeline is ROWS and tile.block < n and not may_cut(class_of(mode)):
        return False
    if tile.held and tile.pipeline is TWO_PASS and not mode.streams:
        return False
    is_short = mode.dtype_in.itemsize <= FP16.itemsize
    return tile.pipeline in mode.pipelines and (tile.pipeline is not SPREAD or mode.is_backward or is_short)


def matching(some: Iterable[AnyCase], words: Iterable[str]) -> list[AnyCase]:
    """Return the cases whose names hold every word."""
    wanted = tuple(words)
    return [case for case in some if all(word in case.name for word in wanted)]
