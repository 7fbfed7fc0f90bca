"""What a launch is given besides its operands: programs, and memory through which they exchange values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.values import DType, Norm, Pipeline
from normforge.errors import DeviceError
from normforge.kernels import pipelines
from normforge.kernels.gpu import named_target
from normforge.kernels.launcher import new_exchange
from normforge.kernels.pipelines import choose, takes_window
from normforge.selection import dispatch
from normforge.upstream.dynamo_guards import allocator

H200 = named_target("sm_90")
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
        programs, *others = pipelines.WINDOW.steps[0].grid(aligned, 1, H200, m, 1)
        assert others == [1, 1]
        assert programs == m or programs % 8 == 0
        assert programs <= m


@pytest.mark.parametrize(
    ("misaligned", "row_stride", "window"),
    [((), 4099, True), (("x",), 4099, False), (("y",), 4099, False), ((), 4101, False), (("weight",), 4099, True)],
)
def test_a_window_needs_rows_of_x_and_y_that_start_alike(
    misaligned: tuple[str, ...], row_stride: int, window: bool
) -> None:
    strides = {"x_row_stride": row_stride, "y_row_stride": 4099}
    pointers = [f"{name}_ptr" for name in misaligned]
    assert takes_window(LN_BF16, tile(Pipeline.ONE_PASS), 4099, strides, pointers) == window


@pytest.mark.parametrize(
    ("pipeline", "n", "window"),
    [("one_pass", 8191, True), ("two_pass", 4099, True), ("two_pass", 8191, False), ("two_pass", 4096, False)],
)
def test_rows_that_start_anywhere_are_held_where_others_are_read_twice(pipeline: str, n: int, window: bool) -> None:
    """What reads a row twice reads it element by element where no vector starts it."""
    strides = {"x_row_stride": n, "y_row_stride": n}
    assert takes_window(LN_BF16, tile(Pipeline(pipeline)), n, strides, []) == window


@pytest.mark.parametrize("mode", ["ln_fwd_bf16", "ln_bwd_bf16"])
def test_where_launches_are_plain_no_program_waits_for_another(mode: str) -> None:
    """Neither for the kernel ahead, nor for the others of its launch: the tile for any GPU is taken instead."""
    target = named_target("sm_90")
    plain = replace(target, plainly=True)
    entry = dispatch.find(Mode.from_name(mode), 131072)
    choices = entry.choices(1024, entry.first, "sm_90")
    assert choose(Mode.from_name(mode), choices, 131072, target).pipeline is Pipeline.SPREAD
    assert choose(Mode.from_name(mode), choices, 131072, plain).pipeline is Pipeline.TWO_PASS
    assert (target.launches_early, plain.launches_early) == (True, False)
    with pytest.raises(DeviceError, match="holds 0 at once"):
        choose(Mode.from_name(mode), choices[:1], 131072, plain)
