"""What a launch is given beside its operands: programs, memory for exchanges, staging, counts and alignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge.call_kinds import MOST_ROWS_IN_I32
from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.tiling import MOST_RESIDENT_WARPS, with_room
from normforge.codegen.values import DType, Norm, Part, Pipeline
from normforge.errors import DeviceError
from normforge.families.public import rmsnorm2d_bwd
from normforge.kernels import pipelines
from normforge.kernels.gpu import Target, named_target, row_count_type
from normforge.kernels.launcher import new_exchange
from normforge.kernels.pipelines import anywhere, choose, staged
from normforge.kernels.strides import row_alignment
from normforge.selection import dispatch
from normforge.upstream.dynamo_guards import allocator

from ..calling import table_at, there

SM_90 = named_target("sm_90")
TABLES: dict[str, list[Any]] = table_at(Path(__file__).with_name("pipelines.yaml"), globals())
LN_BF16 = Mode(Norm.LAYER, DType.BF16, DType.BF16)


def tile(pipeline: Pipeline, **fields: int) -> Tile:
    return Tile(pipeline, **{"rows": 1, "block": 1024, "warps": 4, **fields})


@pytest.mark.parametrize("m", [1, 3, 4, 5, 1000])
@pytest.mark.parametrize("n", [1024, 70000])
def test_every_slot_of_an_exchange_is_there(n: int, m: int) -> None:
    """Forward one for each row and slice of it; backward one for each row of whole tiles, and block of it."""
    slices = -(-n // 1024)
    forward, backward = pipelines.FORWARD[Pipeline.SPREAD].exchange, pipelines.BACKWARD[Pipeline.SPREAD].exchange
    assert forward(tile(Pipeline.SPREAD, held=1), n, m) == m * slices
    assert backward(tile(Pipeline.SPREAD, rows=4), n, m) == -(-m // 4) * 4 * slices


def test_an_exchange_starts_empty() -> None:
    """A slot that holds -1 is waited for; anything else would be taken for what a program found."""
    exchange = new_exchange(allocator(torch.device("cpu")), 5)
    assert exchange.dtype == torch.int64
    assert exchange.tolist() == [-1] * 5


@pytest.mark.parametrize("resident", [1, 3, 7])
def test_rows_of_one_windows_program_start_alike(resident: int) -> None:
    """A program takes every so many rows, and what a row's start lacks to a vector repeats after eight rows."""
    aligned = tile(Pipeline.ONE_PASS, resident=resident)
    for m in (1, 7, 8, 9, 131, 132, 133, 400, 1000, 10**6):
        programs, *others = pipelines.ANYWHERE[Part.WINDOW].steps[0].grid(aligned, 1, SM_90, m, 1)
        assert others == [1, 1]
        assert programs == m or programs % 8 == 0
        assert programs <= m


@pytest.mark.parametrize(("mode", "pipeline", "strides", "misaligned", "part"), TABLES["anywhere"])
def test_rows_start_alike(mode: str, pipeline: str, strides: list[Any], misaligned: str, part: str | None) -> None:
    """Those of all tensors, with one stride, for the kernels that take rows that start anywhere."""
    given = dict(zip(("x_ptr", "y_ptr", "residual_ptr"), strides, strict=False))
    found = anywhere(Mode.from_name(mode), tile(Pipeline(pipeline)), strides[0], given, [f"{misaligned}_ptr"], few=True)
    assert (found and found[0].value) == part


def test_a_window_of_few_rows_keeps_the_warps_of_its_tile() -> None:
    (found,) = normforge.compile_keys([1501], ["rms_fwd_bf16"], arch="sm_90", rows=["few"])
    assert dict(found.key.options)["num_warps"] == 8


@pytest.mark.parametrize("mode", ["ln_fwd_bf16", "ln_bwd_bf16"])
def test_where_launches_are_plain_no_program_waits_for_another(mode: str) -> None:
    """Neither for the kernel ahead, nor for the others of its launch: the tile for any GPU is taken instead."""
    plain = replace(SM_90, plainly=True)
    entry = dispatch.find(Mode.from_name(mode), 131072)
    choices = entry.choices(1024, entry.first, "sm_90")
    assert choose(Mode.from_name(mode), choices, 131072, SM_90).pipeline is Pipeline.SPREAD
    assert choose(Mode.from_name(mode), choices, 131072, plain).pipeline is Pipeline.TWO_PASS
    assert (SM_90.launches_early, plain.launches_early) == (True, False)
    with pytest.raises(DeviceError, match="holds 0 at once"):
        choose(Mode.from_name(mode), choices[:1], 131072, plain)


TILE = Tile(Pipeline.ONE_PASS, 1, 1024, 4, resident=8, stages=6)
UNSTAGED = Tile(Pipeline.ONE_PASS, 1, 1024, 4, resident=4)


@pytest.mark.parametrize(("n", "itemsizes", "together", "target", "expected"), TABLES["stages"])
def test_as_many_stages_as_a_launch_has_room_for(
    n: int, itemsizes: Sequence[int], together: int, target: Target, expected: int
) -> None:
    tile = staged(TILE, UNSTAGED, n, itemsizes, together, target)
    assert tile == (UNSTAGED if expected == 1 else replace(TILE, stages=expected))


@pytest.mark.parametrize(("itemsizes", "resident", "expected"), TABLES["stages of spread"])
def test_a_residual_of_more_bits_leaves_room_for_fewer_stages(
    itemsizes: Sequence[int], resident: int, expected: int
) -> None:
    tile = Tile(Pipeline.SPREAD, 1, 512, 2, resident, held=8, stages=6)
    assert with_room(tile, itemsizes, "sm_90") == replace(tile, stages=expected)


@pytest.mark.parametrize(("n", "dy", "misaligned", "expected"), TABLES["stages of gradients"])
def test_a_launch_whose_rows_cannot_be_copied_takes_them_to_registers(
    n: int, dy: torch.dtype, misaligned: list[str], expected: list[Any]
) -> None:
    lies: dict[str, Any] = {"dy_dtypes": [dy], "misaligned": [misaligned], "rows": ["many"]}
    keys = [each.key for each in normforge.compile_keys([n], ["ln_bwd_bf16"], arch="sm_90", **lies)]
    walkers = [(key.symbol.removeprefix("ln_bwd_bf16_"), dict(key.arguments).get("STAGES")) for key in keys]
    assert {walker for walker in walkers if walker[0] != "sum_partials"} == {(*expected,)}


def test_no_round_of_a_loop_over_rows_leaves_32_bits() -> None:
    """A loop looks two rounds ahead; a round is of as many programs as ever fit, with as many rows as any tile has."""
    tiles = [
        tile for entry in dispatch.loaded() for arch in ("any", "sm_90") for tile in entry.choices(1, entry.first, arch)
    ]
    programs = named_target("sm_100").multiprocessors * MOST_RESIDENT_WARPS
    assert MOST_ROWS_IN_I32 + 2 * programs * max(tile.rows for tile in tiles) < 2**31
    assert row_count_type(MOST_ROWS_IN_I32) == "i32"
    assert row_count_type(MOST_ROWS_IN_I32 + 1) == "i64"


@pytest.mark.parametrize(("positions", "word"), [(2**31 - 2**21, "i32"), (2**31 - 1, "i64"), (2**31, "i64")])
def test_no_position_of_the_last_tiles_of_a_group_leaves_32_bits(positions: int, word: str) -> None:
    keys = normforge.compile_keys(shapes=[f"1x1x{positions}/1"], modes=["gn_fwd_bf16"], arch="sm_90")
    assert {dict(key.key.arguments)["units"] for key in keys} == {word}


@pytest.mark.gpu
def test_gradients_of_almost_as_many_rows_as_32_bits_count() -> None:
    """One column: the next tile of the last round begins beyond 2**31."""
    m = 2**31 - 1000
    x = torch.zeros(m, 1, dtype=torch.bfloat16, device="cuda")
    x[-1] = 1
    rstd = torch.ones(m, device="cuda")
    found = rmsnorm2d_bwd(x, x, torch.ones(1, dtype=torch.bfloat16, device="cuda"), rstd=rstd, wants=("dx", "dweight"))
    assert there(found.dweight).item() == 1
    # h is 1 and g is 1 in the last row: dx = g - h * mean(g * h) is 0 there, and everywhere.
    assert not there(found.dx).any()


# A length of each pipeline that tables have, and one whose rows start anywhere.
LENGTHS = (64, 1500, 4099, 20000, 131072)


@pytest.mark.parametrize(
    ("arch", "launches_early"),
    [("sm_80", False), ("sm_89", False), ("sm_90", True), ("sm_100", True), ("gfx942", False)],
)
def test_a_kernel_is_launched_early_if_and_only_if_it_waits(arch: str, launches_early: bool) -> None:
    found = normforge.compile_keys(LENGTHS, ["*_bf16", "*_bf16_addst", "*_bf16_int8_sdq"], arch=arch)
    early = {key.key.symbol: dict(key.key.options).get("launch_pdl", False) for key in found}
    assert early == {key.key.symbol: dict(key.key.arguments).get("PDL", False) for key in found}
    assert early == {symbol: launches_early and not symbol.endswith("_spread") for symbol in early}
    assert "sum_partials" in early
    assert not any({"launch_pdl", "launch_cooperative_grid"} <= dict(key.key.options).keys() for key in found)


@pytest.mark.parametrize(("strides", "alignment"), TABLES["alignment"])
def test_alignment(strides: list[int], alignment: int) -> None:
    assert row_alignment(*strides) == alignment
