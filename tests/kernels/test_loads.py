"""Which loads of forward kernels are on their way together, and in which layout: what Triton makes of them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.values import DType, FusedAdd, FusedQuant, Norm, Pipeline
from normforge.kernels.gpu import Target

from ..folders import instance
from .compilation import SM_90, TARGETS, binary_of, compiled, usage

pytestmark = pytest.mark.compile

PLAIN = Mode(Norm.LAYER, DType.BF16, DType.BF16)
ADD = replace(PLAIN, fadd=FusedAdd.PRE_ADD_STORE)
QUANT = replace(ADD, dtype_out=DType.FP8_E4M3FN, fquant=FusedQuant.DYNAMIC)


def ttgir_of(mode: Mode, n: int, tile: Tile, operands: torch.dtype = torch.bfloat16) -> str:
    return str(compiled(mode, n, tile=tile, operands=operands).asm["ttgir"])


@pytest.mark.parametrize("operands", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "tile"), [(96, Tile(Pipeline.ROWS, 4, 128, 1)), (440, Tile(Pipeline.ROWS, 4, 512, 2))])
@pytest.mark.parametrize("norm", Norm, ids=lambda norm: norm.value)
def test_rows_that_are_quantised_keep_the_layout_they_are_read_in(
    norm: Norm, n: int, tile: Tile, operands: torch.dtype
) -> None:
    """Operands whose vectors are fewer values than those of rows would have a tile go through shared memory, twice."""
    mode = replace(QUANT, norm=norm, fadd=FusedAdd.NONE)
    ttgir = ttgir_of(mode, n, tile, operands)
    assert re.findall(rf"convert_layout .* : tensor<{tile.rows}x{tile.block}x(?:f32|bf16)", ttgir) == []


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
@pytest.mark.parametrize("mode", [PLAIN, replace(QUANT, dtype_in=DType.FP32)], ids=lambda mode: mode.name)
def test_no_thread_holds_what_others_have(mode: Mode, target: Target) -> None:
    """Of rows whose sums are of fours, Triton gave all of y to each thread, and LLVM did not come to an end."""
    tile = Tile(Pipeline.ROWS, 2, 1024, 1)
    assert len(compiled(mode, 848, target, tile).asm[binary_of(target)]) < 200_000


@pytest.mark.parametrize("mode", [replace(QUANT, fadd=FusedAdd.NONE), QUANT], ids=lambda mode: mode.name)
def test_operands_of_quantised_rows_are_on_their_way_before_rows_are(mode: Mode) -> None:
    """Behind sums they would be waited for once more: a wave of rows takes as long as memory takes to answer."""
    tile = Tile(Pipeline.ROWS, 2, 512, 1)
    ttgir = ttgir_of(mode, 440, tile)
    (reduced, *_), loads = ([at.start() for at in re.finditer(word, ttgir)] for word in ('"tt.reduce"', "tt.load"))
    assert len(loads) == 2 + 1 + mode.fadd.adds
    assert max(loads) < reduced


@pytest.mark.parametrize(("n", "masked"), [(26952, 1), (28672, 1), (32768, 0)])
@pytest.mark.parametrize("mode", [PLAIN, ADD], ids=lambda mode: mode.name)
def test_chunks_of_a_row_that_is_read_again_are_unrolled_and_its_last_is_masked(
    mode: Mode, n: int, masked: int
) -> None:
    """Three readings of four chunks, one of them of rows that need it, and weight and bias."""
    ttgir = ttgir_of(mode, n, Tile(Pipeline.TWO_PASS, 1, 8192, 16, 2))
    loads = re.findall(r"tt\.load %\S+?(, %mask\S*)?[, ]", ttgir)
    assert "scf.for" not in ttgir
    # The first chunk of the first reading stands there once, as its pivots' and its own.
    assert len(loads) == 4 * (3 * (1 + mode.fadd.adds) + 2)
    assert sum(map(bool, loads)) == masked * (3 * (1 + mode.fadd.adds) + 2)


def test_chunks_that_are_many_or_quantised_are_taken_one_by_one() -> None:
    """Four quantised ones side by side spill."""
    assert "scf.for" in ttgir_of(PLAIN, 9 * 1024, Tile(Pipeline.TWO_PASS, 1, 1024, 8))
    assert "scf.for" not in ttgir_of(PLAIN, 8 * 1024, Tile(Pipeline.TWO_PASS, 1, 1024, 8))
    assert "scf.for" in ttgir_of(QUANT, 32768, Tile(Pipeline.TWO_PASS, 1, 8192, 32))


@pytest.mark.parametrize("n", [9432, 13312, 26952, 53952])
@pytest.mark.parametrize("mode", [PLAIN, ADD, replace(ADD, norm=Norm.RMS)], ids=lambda mode: mode.name)
def test_rows_that_are_read_again_spill_next_to_nothing(mode: Mode, n: int) -> None:
    """With tiles that were measured, and a residual of fp32.

    Of five chunks and more with an add some is spilled, and that is faster all the same: LayerNorm of 114792 columns
    takes an H200 375 us with 312 bytes spilled, and 390 with its chunks one by one.
    """
    tile = dict(instance(mode, n).tiles)[SM_90.arch].large
    usage(compiled(mode, n, tile=tile, operands=torch.bfloat16)).assert_fits(tile, most_stack=32)
