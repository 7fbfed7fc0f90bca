"""The calls that are sanitised launch everything: no new template, pipeline, part or class of tiles is left out."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from normforge.calls.row_layout import row_stride
from normforge.codegen import emit
from normforge.codegen.groups import AnyMode, mode_named
from normforge.codegen.model import Mode
from normforge.codegen.values import Direction, Part, Pipeline
from normforge.kernels.gpu import KernelKey, named_target
from normforge.kernels.strides import RowWalk
from normforge.selection import dispatch
from proving.cold_warm.session import forgotten
from proving.sanitizer.beside import beside
from proving.sanitizer.cells import ARCH, Cell, TileKind, cells, every, kind_of, share, text_of

from ..launching import launching_nothing

CPU = torch.device("cpu")
FINALISER = "sum_partials"


@cache
def launched(cell: Cell) -> tuple[KernelKey, ...]:
    """What a call launches on the architecture."""
    with forgotten(), launching_nothing(named_target(ARCH)) as met:
        cell.call(CPU)
    assert met, cell.name
    return tuple(met)


def part_of(key: KernelKey) -> tuple[AnyMode, Pipeline | Part]:
    """The mode of a kernel, and which of the mode's kernels it is."""
    name = key.portable.partition(":")[0]
    word = key.symbol.removeprefix(f"{name}_")
    return mode_named(name), next(part for part in (*Pipeline, *Part) if part.value == word)


@cache
def kernels() -> frozenset[tuple[AnyMode, Pipeline | Part]]:
    keys = {key for cell in cells() for key in launched(cell) if key.symbol != FINALISER}
    return frozenset(map(part_of, keys))


def test_every_kernel_text_of_the_table_is_touched() -> None:
    expected = set()
    for entry in dispatch.loaded():
        mode = Mode.from_name(entry.mode)
        for tile in entry.tiles_on(ARCH).every:
            # A backward sweep has two kernels; window has rows of its own.
            expected |= {(text_of(mode), part) for part in emit.parts(mode, tile.pipeline)}
    assert {(text_of(mode), part) for mode, part in kernels() if isinstance(mode, Mode)} >= expected


def test_every_class_of_tiles_is_touched() -> None:
    touched: set[TileKind] = set()
    expected: set[TileKind] = set()
    for cell in cells():
        entry = next((e for e in dispatch.loaded() if e.mode == cell.mode.name and e.serves(cell.n)), None)
        if entry is None:
            # An edge of a mode that instances.yaml leaves out.
            continue
        few = cell.m <= entry.small_m
        kind = kind_of(cell.mode.direction, entry.tile(cell.m, cell.n, ARCH), few=few)
        ran = {key.symbol.removeprefix(f"{cell.mode.name}_") for key in launched(cell)}
        # A staged tile is left for another where rows cannot be read in pairs, and window has its own.
        stages = {dict(key.arguments).get("STAGES", 1) for key in launched(cell)}
        if kind.pipeline.value in ran and (not kind.staged or stages - {1}):
            touched.add(kind)
    for entry in dispatch.loaded():
        direction = Mode.from_name(entry.mode).direction
        expected |= {kind_of(direction, t, few=not at) for at, t in enumerate(entry.tiles_on(ARCH).by_rows)}
    assert touched == expected
    for name in ("few", "staged", "held", "resident"):
        assert {getattr(kind, name) for kind in expected} == {False, True}


def test_shares_are_every_cell_once() -> None:
    all_of_them = every()
    for parts in (1, 3, 8):
        some = [cell for part in range(parts) for cell in share(all_of_them, part + 1, parts)]
        assert sorted(cell.name for cell in some) == sorted(cell.name for cell in all_of_them)
    assert len({cell.name for cell in all_of_them}) == len(all_of_them)


@pytest.mark.parametrize("step", sorted({cell.step for cell in beside()}))
def test_what_the_table_lacks_is_called_in_every_pipeline(step: str) -> None:
    with forgotten(), launching_nothing(named_target(ARCH)) as met:
        for cell in beside():
            if cell.step == step:
                cell.call(CPU)
    touched = {part_of(key) for key in met if key.symbol != FINALISER}
    wanted = {
        (mode.direction, part)
        for mode, _ in touched
        for pipeline in mode.pipelines
        for part in emit.parts(mode, pipeline)
        if part not in (Pipeline.SPREAD, Part.WINDOW)
    }
    assert {(mode.direction, part) for mode, part in touched} >= wanted
    forward_alone = step.endswith("quantised")
    assert {direction for direction, _ in wanted} == ({Direction.FORWARD} if forward_alone else set(Direction))


@pytest.mark.parametrize("cell", [cell for cell in cells() if cell.m * cell.n < 10000], ids=lambda cell: cell.name)
def test_the_calls_are_of_the_modes_that_they_are_named_after(cell: Cell) -> None:
    """And their rows lie as the name says, up to the last element of their memory."""
    assert {part_of(key)[0] for key in launched(cell) if key.symbol != FINALISER} == {cell.mode}
    _, arguments = cell.arguments(CPU)
    x = arguments["x"]
    assert isinstance(row_stride("x", x), RowWalk) == bool(cell.heads)
    last = x[(-1,) * x.dim()]
    assert last.storage_offset() + 1 == x.untyped_storage().nbytes() // x.element_size()
    assert (arguments.get("out") is x) == cell.in_place


def test_heads_are_read_and_written_in_place_by_each_pipeline_in_both_directions() -> None:
    some = [cell for cell in cells() if cell.heads]
    touched = {part_of(key) for cell in some for key in launched(cell) if key.symbol != FINALISER}
    for direction in Direction:
        assert {part for mode, part in touched if mode.direction is direction} >= set(Pipeline)
    assert {cell.in_place for cell in some} == {False, True}
