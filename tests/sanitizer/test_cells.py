"""The calls that are sanitised touch everything: no new template, pipeline, part or class of tiles is left out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import normforge
from normforge.ahead_of_time.compile_keys import CompileKey
from normforge.call_kinds import ROWS
from normforge.calls.check import check
from normforge.calls.row_layout import row_stride
from normforge.codegen import emit
from normforge.codegen.groups import AnyMode, group_modes
from normforge.codegen.model import Mode
from normforge.codegen.values import Direction, DType, FusedAdd, FusedQuant, Gating, Part, Pipeline
from normforge.dtypes import DTYPES
from normforge.kernels.strides import RowWalk
from normforge.selection import dispatch
from proving.sanitizer.beside import Beside, beside
from proving.sanitizer.cells import ARCH, Cell, TileKind, cells, edges, every, kind_of, share, text_of
from proving.sanitizer.worker import call, call_of
from tests.norms import FULL
from tests.thorough import first_of_each

_BF16 = DType.BF16
_WAYS = {"save_mv": True}, {"direction": Direction.BACKWARD}
# What calls beside the table come to, in bf16, by norm and step.
MODES: dict[tuple[str, str], list[AnyMode]] = {
    **{
        (norm.value, step): [Mode(norm, _BF16, _BF16, **axes, **way) for axes in each for way in ways]
        for norm in FULL
        for step, each, ways in (
            ("dropped", ({"dropout": True, "fadd": FusedAdd.PRE_ADD_STORE},), _WAYS),
            ("modulated", ({"modulated": True},), _WAYS),
            ("gated", ({"gating": Gating.AFTER_NORM}, {"gating": Gating.BEFORE_NORM}), _WAYS),
        )
    },
    **{
        (norm.value, "gated_quantised"): [
            Mode(norm, _BF16, DType.INT8, gating=Gating.AFTER_NORM, fquant=FusedQuant.DYNAMIC, save_mv=True)
        ]
        for norm in FULL
    },
    **{
        (norm.value, "modulated_quantised"): [
            Mode(
                norm,
                _BF16,
                DType.INT8,
                FusedAdd.PRE_ADD_STORE,
                FusedQuant.DYNAMIC,
                save_mv=True,
                modulated=True,
                x_gate=True,
            )
        ]
        for norm in FULL
    },
    ("group", "grouped"): [mode for mode in group_modes() if mode.dtype_in is _BF16],
}

# Templates that hold no kernel: frames of files, and device functions.
_FRAMES = ("calls", "dispatch", "functional", "jax_functions", "module", "modules", "operands", "package", "primitives")
FRAMES = {f"{name}.py.j2" for name in _FRAMES}
FINALISER = "sum_partials"


def rows_of(m: int) -> list[str]:
    return [ROWS[next(iter(dispatch.loaded())).size(m)]]


@cache
def compiled(cell: Cell) -> tuple[CompileKey, ...]:
    """What a call comes to on the architecture, by the planning of real calls."""
    strides = (cell.strides[0], cell.heads, cell.n) if cell.heads else cell.stride
    keys = normforge.compile_keys([cell.n], [cell.mode], arch=ARCH, rows=rows_of(cell.m), row_strides=[strides])
    return tuple(keys)


def kernels() -> Iterator[tuple[Mode, Pipeline | Part]]:
    for cell in cells():
        for key in compiled(cell):
            if key.key.symbol != FINALISER:
                word = key.key.symbol.removeprefix(f"{cell.mode.name}_")
                yield cell.mode, next(part for part in (*Pipeline, *Part) if part.value == word)


def test_every_template_of_a_kernel_is_touched(repository: Path) -> None:
    touched = {f"{'bwd_' if mode.is_backward else ''}{part.value}.py.j2" for mode, part in kernels()}
    if any(key.key.symbol == FINALISER for cell in cells() for key in compiled(cell)):
        touched.add("finalise.py.j2")
    found = {path.name for path in (repository / "templates").glob("*.py.j2")}
    of_groups = {name for name in found if name.startswith(("gn_", "group_"))}
    assert touched == found - FRAMES - of_groups


def test_every_pipeline_and_part_is_touched_in_each_direction_that_has_it() -> None:
    some = [Mode.from_name(entry.mode) for entry in dispatch.loaded()]
    expected = {
        (mode.direction, part) for mode in some for pipeline in mode.pipelines for part in emit.parts(mode, pipeline)
    }
    assert {(mode.direction, part) for mode, part in kernels()} == expected
    assert {part for _, part in expected} == {*Pipeline, *(part for part in Part if not part.is_of_groups)}
    assert {direction for direction, _ in expected} == set(Direction)


def test_every_kernel_text_of_the_table_is_touched() -> None:
    expected = set()
    for entry in dispatch.loaded():
        mode = Mode.from_name(entry.mode)
        for tile in entry.tiles_on(ARCH).every:
            # A backward sweep has two kernels; window has rows of its own.
            expected |= {(text_of(mode), part) for part in emit.parts(mode, tile.pipeline)}
    assert {(text_of(mode), part) for mode, part in kernels()} >= expected


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
        ran = {key.key.symbol.removeprefix(f"{cell.mode.name}_") for key in compiled(cell)}
        # A staged tile is left for another where rows cannot be read in pairs, and window has its own.
        stages = {dict(key.key.arguments).get("STAGES", 1) for key in compiled(cell)}
        if kind.pipeline.value in ran and (not kind.staged or stages - {1}):
            touched.add(kind)
    for entry in dispatch.loaded():
        direction = Mode.from_name(entry.mode).direction
        expected |= {kind_of(direction, t, few=not at) for at, t in enumerate(entry.tiles_on(ARCH).by_rows)}
    assert touched == expected
    for name in ("few", "staged", "held", "resident"):
        assert {getattr(kind, name) for kind in expected} == {False, True}


def test_rows_that_start_anywhere_are_read_by_window_and_end_with_their_memory() -> None:
    odd = [cell for cell in edges() if cell.mode.has_window and cell.stride is None and cell.n in (100, 4099, 5137)]
    assert {cell.m for cell in odd} >= {3, 300, 2305}
    for cell in odd:
        assert {key.key.symbol for key in compiled(cell)} == {cell.mode.kernel(Part.WINDOW)}, cell.name


def test_shares_are_every_cell_once() -> None:
    all_of_them = every()
    for parts in (1, 3, 8):
        some = [cell for part in range(parts) for cell in share(all_of_them, part + 1, parts)]
        assert sorted(cell.name for cell in some) == sorted(cell.name for cell in all_of_them)
    assert len({cell.name for cell in all_of_them}) == len(all_of_them)


SMALL: list[Cell | Beside] = [cell for cell in cells() if cell.m * cell.n < 200 and cell.m < 9]
# One of each kind, and the others where there is time.
BESIDE = first_of_each(
    [cell for cell in beside() if cell.m * cell.n < 700],
    lambda cell: (
        (cell.step, cell.case["layout"], "gate" in cell.case["without"]) if cell.case["norm"] != "rms" else None
    ),
    lambda cell: cell.name,
)


@pytest.mark.parametrize("cell", [*(pytest.param(cell, id=cell.name) for cell in SMALL), *BESIDE])
def test_the_calls_are_legal(cell: Cell | Beside) -> None:
    call(cell, torch.device("cpu"))


def test_what_the_table_lacks_is_called_in_every_pipeline() -> None:
    """Of the calls' row lengths, on the architecture; GroupNorm's spread is a table's, which there is none of."""
    touched: set[tuple[str, Direction, Pipeline | Part]] = set()
    for cell in beside():
        norm = "group" if cell.step == "grouped" else cell.case["norm"]
        modes = [mode for mode in MODES[norm, cell.step] if mode.dtype_in is DTYPES[cell.case["dtype"]]]
        for mode in modes:
            if isinstance(mode, Mode):
                found = normforge.compile_keys([cell.shape[-1]], [mode], arch=ARCH, rows=rows_of(cell.m))
            elif mode.channels_last is (cell.case["layout"] == "channels last"):
                shape = f"{'x'.join(map(str, cell.shape))}/{cell.case['num_groups']}"
                found = normforge.compile_keys(modes=[mode], shapes=[shape], arch=ARCH)
            else:
                continue
            words = {key.key.symbol.removeprefix(f"{mode.name}_") for key in found} - {FINALISER}
            parts = (next(part for part in (*Pipeline, *Part) if part.value == word) for word in words)
            touched |= {(cell.step, mode.direction, part) for part in parts}
    for step, mode in {(step, mode) for (_, step), modes in MODES.items() for mode in modes}:
        wanted = {part for pipeline in mode.pipelines for part in emit.parts(mode, pipeline)}
        wanted -= {Pipeline.SPREAD, Part.WINDOW}
        assert {part for each, way, part in touched if (each, way) == (step, mode.direction)} >= wanted


@pytest.mark.parametrize("cell", [cell for cell in cells() if cell.m * cell.n < 10000], ids=lambda cell: cell.name)
def test_the_calls_are_of_the_modes_that_they_are_named_after(cell: Cell) -> None:
    """And their rows lie as the name says, up to the last element of their memory."""
    function, arguments = call_of(cell, torch.device("cpu"))
    assert check(function, arguments).mode == cell.mode
    x = arguments["x"]
    assert isinstance(row_stride("x", x), RowWalk) == bool(cell.heads)
    last = x[(-1,) * x.dim()]
    assert last.storage_offset() + 1 == x.untyped_storage().nbytes() // x.element_size()
    assert (arguments.get("out") is x) == cell.in_place


def test_heads_are_read_and_written_in_place_by_each_pipeline_in_both_directions() -> None:
    some = [cell for cell in cells() if cell.heads]
    touched = {
        (cell.mode.direction, key.key.symbol.split(f"{cell.mode.name}_")[-1]) for cell in some for key in compiled(cell)
    }
    assert {direction for direction, _ in touched} == set(Direction)
    for direction in Direction:
        assert {word for each, word in touched if each is direction} >= {pipeline.value for pipeline in Pipeline}
    assert {cell.in_place for cell in some} == {False, True}
