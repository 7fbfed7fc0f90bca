"""Kernels compiled without a GPU for the targets normforge names, and what Triton makes of some of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from normforge.ahead_of_time.compile_keys import compile_keys
from normforge.call_kinds import MOST_ROWS_IN_I32
from normforge.calls.check import check
from normforge.calls.plan import Plan
from normforge.codegen import emit
from normforge.codegen.instance import Instance, Tile
from normforge.codegen.model import Mode
from normforge.codegen.tiling import STANDARD_LENGTHS, window_tile
from normforge.codegen.values import Direction, DType, FusedAdd, FusedQuant, Norm, Part, Pipeline
from normforge.kernels.gpu import Target
from normforge.kernels.obtain import compile_for

from ..calling import there
from ..covering import parametrize
from ..folders import instance
from ..thorough import COSTLY, LONG, THOROUGH, first_of_each
from . import compile_cases
from .compile_cases import LENGTHS, NVIDIA, SM_90, SPREAD_TILES, TARGETS, Case, binary_of, compiled, usage

pytestmark = pytest.mark.compile


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give what is compiled to the test that does so."""
    if "case" in metafunc.fixturenames:
        parametrize(metafunc, "case", compile_cases.quick, compile_cases.thorough, lambda case: case.name)


def test_compiles(case: Case) -> None:
    assert compiled(case.mode, case.n, case.target, case.tile, case.part).asm[binary_of(case.target)]


LAYER_BF16 = Mode(Norm.LAYER, DType.BF16, DType.BF16)
LAYER_BWD_BF16 = replace(LAYER_BF16, direction=Direction.BACKWARD)


@pytest.mark.parametrize(("n", "chunks", "masked"), [(5120, 5, 0), (4096, 4, 0), (5008, 5, 1)])
def test_a_row_is_read_by_16_byte_loads_and_only_a_ragged_chunk_is_masked(n: int, chunks: int, masked: int) -> None:
    """A chunk of 1024 on 128 threads: one load of bf16 x, and two each of fp32 weight and bias."""
    loads = [line for line in compiled(LAYER_BF16, n).asm["ptx"].splitlines() if "ld.global" in line]
    assert len(loads) == 5 * chunks
    assert all("v4.b32" in line for line in loads)
    assert sum("@%p" in line for line in loads) == 5 * masked


@pytest.mark.parametrize("n", [100, 1000, 8192])
@pytest.mark.parametrize(
    "mode", ["ln_fwd_bf16_gb", "ln_fwd_bf16_xg_addst_mod", "ln_fwd_bf16_drop_add", "ln_fwd_bf16_xb"]
)
def test_lanes_have_the_same_pivot(mode: str, n: int) -> None:
    """A sum across lanes is fused with no multiplication: each lane would round all products but its own.

    The mean of a gated row whose first values were large was off by 340 units.
    """
    tile = Tile(Pipeline.ONE_PASS, 1, 4096, 16) if n > 4096 else Tile(Pipeline.ONE_PASS, 1, 1024, 4)
    ptx = compiled(Mode.from_name(mode), n, tile=tile).asm["ptx"]
    others = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+),", ptx))
    assert others
    fused = re.findall(r"fma\.rn\.f32\s+%\w+, (.*);", ptx)
    assert [operands for operands in fused if others & set(operands.split(", "))] == []


@pytest.mark.parametrize(("n", "vector"), [(1000, "v4.b32"), (4104, "v4.b32"), (1004, "v2.b32"), (1001, None)])
@pytest.mark.parametrize("direction", Direction)
def test_vectors_are_as_wide_as_the_row_stride_allows(n: int, vector: str | None, direction: Direction) -> None:
    """bf16 rows of 1000 start at multiples of 16 bytes, though 16 does not divide 1000; those of 1004 at 8."""
    # The rows that x, y, dy and dx are in; weight and bias, (N,) and fp32, always have whole vectors.
    ptx = compiled(replace(LAYER_BF16, direction=direction), n).asm["ptx"]
    rows = [line for line in ptx.splitlines() if "global" in line and ("ld." in line or "st." in line)]
    scalar = [line for line in rows if ".b16" in line]
    if vector is None:
        assert scalar
    else:
        assert not scalar
        assert any(f"st.global.{vector}" in line for line in rows)
        assert any(f"ld.global.{vector}" in line for line in rows)


@pytest.mark.parametrize("n", [1501, pytest.param(4099, marks=THOROUGH), 5137])
@pytest.mark.parametrize("norm", Norm, ids=lambda norm: norm.value)
def test_rows_that_start_anywhere_move_by_pairs(norm: Norm, n: int) -> None:
    """All of x and y but for their ends; the 16 lanes of y's two vectors there are one element of a thread.

    Weight and bias stay in registers as pairs, without a spill.
    """
    mode = Mode(norm, DType.BF16, DType.BF16)
    tile = window_tile(mode, instance(mode, n).tile, n, few=False)
    usage(compiled(mode, n, part=Part.WINDOW, operands=torch.bfloat16)).assert_fits(tile)
    # Operands of fp32 are moved by 32 bits as well.
    ptx = compiled(mode, n, part=Part.WINDOW).asm["ptx"]
    moves = {kind: [line for line in ptx.splitlines() if f"{kind}.global" in line] for kind in ("ld", "st")}
    # Of x the first chunk and the last too, so that nothing beside the row is read; a row's and the next one's.
    ends = sum(start == 0 or start + tile.block > n for start in range(0, n + 7, tile.block))
    assert sum(".b16" in line for line in moves["ld"]) == 2 * (1 + ends * tile.block // (32 * tile.warps))
    assert sum(".b16" in line for line in moves["st"]) == 1
    assert len(moves["st"]) == -(-(n + 7) // tile.block) + 1


def spreading(mode: Mode, n: int) -> set[Tile]:
    """The tiles of sm_90 that spread rows of this length."""
    return {tile for tile in dict(instance(mode, n).tiles)[SM_90.arch].every if tile.pipeline is Pipeline.SPREAD}


@pytest.mark.parametrize("norm", Norm, ids=lambda norm: norm.value)
@pytest.mark.parametrize("n", [65536, 131072, 262144])
def test_a_team_keeps_its_slices_of_weight_and_bias(n: int, norm: Norm) -> None:
    """As pairs, beside the row at hand and the next: what sm_90 takes, without a spill."""
    mode = Mode(norm, DType.BF16, DType.BF16)
    for tile in {SPREAD_TILES[Direction.FORWARD], *spreading(mode, n)}:
        usage(compiled(mode, n, tile=tile, operands=torch.bfloat16)).assert_fits(tile)


# The most of shared memory that a program needs besides its rows: `staging` sets 2 KiB aside, one of which CUDA keeps.
MOST_FOR_REDUCTIONS = 1024


@pytest.mark.parametrize(
    ("mode", "n", "tile", "row_bytes"),
    [
        (LAYER_BF16, 131072, Tile(Pipeline.SPREAD, 1, 8192, 8, 2, 1, stages=3), 2 * 8192),
        (LAYER_BF16, LENGTHS[Pipeline.SPREAD], Tile(Pipeline.SPREAD, 1, 512, 2, 4, 8, stages=4), 2 * 4096),
        # x and dy, in whole chunks.
        (LAYER_BWD_BF16, 4096, Tile(Pipeline.ONE_PASS, 1, 1024, 4, 2, stages=3), 4 * 4096),
        (LAYER_BWD_BF16, 6000, Tile(Pipeline.ONE_PASS, 1, 2048, 8, 1, stages=4), 4 * 6144),
        (LAYER_BWD_BF16, 768, Tile(Pipeline.ONE_PASS, 1, 512, 2, 8, stages=3), 4 * 1024),
    ],
)
@pytest.mark.parametrize("target", NVIDIA, ids=lambda target: target.arch)
def test_rows_on_their_way_and_nothing_else_stand_in_shared_memory(
    target: Target, mode: Mode, n: int, tile: Tile, row_bytes: int
) -> None:
    """Triton pipelines what it will: had it left the loop alone, or copied weight too, only a timing would tell."""
    found = compiled(mode, n, target, tile, operands=torch.bfloat16)
    assert 0 <= found.metadata.shared - (tile.stages - 1) * row_bytes <= MOST_FOR_REDUCTIONS
    assert "cp.async" in found.asm["ptx"]


# KiB of a multiprocessor of sm_90, one of which CUDA keeps of each program.
SHARED_MEMORY = 228


@LONG
@THOROUGH
@pytest.mark.parametrize(("n", "residual"), [(70000, torch.bfloat16), (131072, torch.float32)])
def test_programs_that_share_rows_of_sums_fit_side_by_side(n: int, residual: torch.dtype) -> None:
    """They wait for one another: were there room for fewer, none would be launched."""
    mode = Mode(Norm.RMS, DType.BF16, DType.BF16, FusedAdd.PRE_ADD_STORE)
    spread = spreading(mode, n)
    assert spread
    for tile in (*spread, SPREAD_TILES[Direction.FORWARD], Tile(Pipeline.SPREAD, 1, 8192, 8, 2, 1, stages=6)):
        found = compiled(mode, n, tile=tile, operands=torch.bfloat16, residual=residual)
        assert tile.resident * (found.metadata.shared + 1024) <= SHARED_MEMORY * 1024
        assert "cp.async" in found.asm["ptx"]


@pytest.mark.parametrize(
    ("target", "pipeline"),
    [(target, each) for target in TARGETS for each in Pipeline if each.runs_on(target.arch)],
    ids=lambda value: value.arch if isinstance(value, Target) else value.value,
)
def test_a_bf16_and_an_fp16_are_added_in_fp32(target: Target, pipeline: Pipeline) -> None:
    """LLVM would add in fp16, where a large bf16 is infinite, because the sum is rounded to fp16."""
    mode, tile = Mode.from_name("rms_fwd_bf16_addst"), Tile(pipeline, 1 + (pipeline is Pipeline.ROWS), 1024, 4, held=1)
    tile = tile if pipeline is Pipeline.SPREAD else replace(tile, held=0)
    llir = compiled(mode, 1024, target, tile, operands=torch.bfloat16, residual=torch.float16).asm["llir"]
    adds = re.findall(r"fadd [^%]*", llir)
    assert adds
    assert not [add for add in adds if "half" in add]


@pytest.mark.parametrize("norm", Norm, ids=lambda norm: norm.value)
@pytest.mark.parametrize("target", NVIDIA, ids=lambda target: target.arch)
def test_no_round_of_a_backward_loop_waits_for_a_load(target: Target, norm: Norm) -> None:
    """Mean and rstd are on their way as x and dy are: ptxas moves what is loaded behind the sums that come first."""
    tile = Tile(Pipeline.ONE_PASS, 1, 1024, 4, 2, stages=3)
    found = compiled(replace(LAYER_BWD_BF16, norm=norm), 4096, target, tile, operands=torch.bfloat16)
    ttgir = found.asm["ttgir"]
    loop = ttgir[ttgir.index("scf.for") : ttgir.index("scf.yield")]
    assert "tt.load" not in loop
    # Four chunks of each of x and dy, rstd, and LayerNorm's mean.
    assert loop.count("async_copy_global_to_local") == 4 + 4 + 1 + (norm is Norm.LAYER)


# Bytes that a thread may spill. A fused add has a third operand, for which a held row of 5120 leaves no room.
MOST_SPILLED = {FusedAdd.NONE: 48, FusedAdd.PRE_ADD_STORE: 192}
# A tile that an H200 was seen to prefer all the same: 278 us, and 299 of one that spills nothing (64 bytes with Triton
# 3.7, 88 with 3.6).
PREFERRED_SPILLS = {(Norm.RMS, 131072): 88}
BACKWARD_LENGTHS = (*filter(None, STANDARD_LENGTHS), 20000)


BACKWARD_MODES = [*map(Mode.from_name, ("ln_bwd_bf16", "ln_bwd_bf16_addst", "rms_bwd_fp16"))]
BACKWARD_INSTANCES = [instance(mode, n) for mode in BACKWARD_MODES for n in BACKWARD_LENGTHS]
ONE_A_PIPELINE = first_of_each(
    zip(BACKWARD_INSTANCES, BACKWARD_LENGTHS * len(BACKWARD_MODES), strict=True),
    lambda case: (case[0].mode, dict(case[0].tiles)[SM_90.arch].large.pipeline),
    lambda case: f"{case[0].mode.name}-{case[1]}",
)


@COSTLY
@pytest.mark.parametrize("backward", ONE_A_PIPELINE)
def test_as_many_programs_fit_a_multiprocessor_as_the_tile_says(backward: tuple[Instance, int]) -> None:
    """Within the registers that leaves each thread, backward kernels spill next to nothing: by rule and as measured."""
    made, n = backward
    mode = made.mode
    assert isinstance(mode, Mode)
    for tile in {made.tile, dict(made.tiles)[SM_90.arch].large}:
        spilled = PREFERRED_SPILLS.get((mode.norm, n), MOST_SPILLED[mode.fadd])
        usage(compiled(mode, n, tile=tile)).assert_fits(tile, spilled)


FP8_SUM = Mode(Norm.RMS, DType.FP8_E4M3FN, DType.BF16, FusedAdd.PRE_ADD_STORE)


@pytest.mark.parametrize("dtype", [DType.FP8_E4M3FN, DType.FP8_E5M2], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_an_fp8_x_is_read_by_8_bytes_a_thread_and_decoded(target: Target, dtype: DType) -> None:
    """By instruction where there is one; a thread has as many values of it as 16 bytes of y."""
    mode = replace(FP8_SUM, dtype_in=dtype)
    found = compiled(mode, 4096, target)
    assert found.asm[binary_of(target)]
    if target.is_nvidia:
        ptx = found.asm["ptx"]
        word = dtype.value.removeprefix("fp8_").removesuffix("fn")
        assert (f"cvt.rn.f16x2.{word}x2" in ptx) is target.converts_to_fp8
        assert ptx.count("ld.global.v2.b32") == 4096 // instance(mode, 4096).tile.block
        assert usage(found).local == usage(found).stack == 0


def test_an_fp8_x_is_multiplied_before_it_is_added() -> None:
    """Each product by itself, plus zero: left as a product, it and the residual would be rounded once."""
    ptx = compiled(FP8_SUM, 4096).asm["ptx"]
    products = re.findall(r"fma\.rn\.f32\s+%r\d+, (%r\d+), (%r\d+), 0f00000000;", ptx)
    # Of the squares the first of each sum are added to zero as well.
    assert sum(value != scale for value, scale in products) == 4096 // (instance(FP8_SUM, 4096).tile.warps * 32)


@pytest.mark.parametrize("n", [128, 768])
def test_each_thread_reads_the_scales_of_its_rows_once(n: int) -> None:
    """Of a column a thread would read one for each value of the row that it holds: 16."""
    mode = replace(FP8_SUM, fadd=FusedAdd.NONE)
    assert compiled(mode, n).asm["ptx"].count("ld.global.b32") <= instance(mode, n).tile.rows


# Groups of a warp's width, and what block-scaled products take, in tiles.
_SCALED = (
    *("fp8_e4m3fn_addst_dq_g128", "fp8_e4m3fn_addst_dq_g128_ue8m0", "fp8_e4m3fn_addst_dq_g128_ue8m0p"),
    *("fp8_e4m3fn_addst_dq_g32_ue8m0_swz", "fp4_e2m1fn_addst_dq_g16_e4m3_swz"),
)


def _ptx_of_chunks(n: int, mode: str = _SCALED[0]) -> str:
    """PTX of quantised rows: where scales are of groups, a warp has a group of each chunk."""
    tile = Tile(Pipeline.ONE_PASS, 1, 1024, 8)
    return str(compiled(Mode.from_name(f"rms_fwd_bf16_{mode}"), n, tile=tile).asm["ptx"])


@pytest.mark.parametrize("mode", _SCALED)
def test_scales_of_groups_are_stored_by_threads_that_have_them(mode: str) -> None:
    """No barrier beyond those of a kernel whose scale is given."""
    given = _ptx_of_chunks(4096, "fp8_e4m3fn_addst_sq")
    assert _ptx_of_chunks(4096, mode).count("bar.sync") == given.count("bar.sync")


def test_chunks_with_scales_of_groups_are_under_way_together() -> None:
    """All of weight is loaded before a scale is stored, and no division, which branches, is between the chunks."""
    ptx = _ptx_of_chunks(5120)
    assert ptx.rindex("ld.global") < ptx.index("@there st.global")
    assert "div.rn" not in ptx


def test_addresses_of_scales_are_multiplied_once_a_row() -> None:
    def multiplications(n: int) -> int:
        return len(re.findall(r"mul\.(?:lo|wide)\.[su](?:32|64)", _ptx_of_chunks(n)))

    assert multiplications(7168) == multiplications(5120)


@pytest.mark.parametrize("dtype", [DType.FP8_E4M3FN, DType.FP8_E5M2])
@pytest.mark.parametrize("target", NVIDIA, ids=lambda target: target.arch)
def test_saturating_keeps_nan(target: Target, dtype: DType) -> None:
    """NumPy's minima return NaN whatever is asked, so that the interpreter cannot tell; PTX's do where they say so."""
    ptx = compiled(Mode(Norm.RMS, DType.BF16, dtype, fquant=FusedQuant.STATIC), 4096, target).asm["ptx"]
    assert not re.findall(r"(?:min|max)\.f32", ptx)
    # One instruction for both ends, and one for two values, which keeps NaN too.
    word = dtype.value.removeprefix("fp8_").removesuffix("fn")
    for instruction in ("min.NaN.xorsign.abs.f32", f"cvt.rn.satfinite.{word}x2.f32"):
        assert (instruction in ptx) is target.converts_to_fp8


ADD = replace(LAYER_BF16, fadd=FusedAdd.PRE_ADD_STORE)
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
@pytest.mark.parametrize("mode", [LAYER_BF16, replace(QUANT, dtype_in=DType.FP32)], ids=lambda mode: mode.name)
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
@pytest.mark.parametrize("mode", [LAYER_BF16, ADD], ids=lambda mode: mode.name)
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
    assert "scf.for" in ttgir_of(LAYER_BF16, 9 * 1024, Tile(Pipeline.TWO_PASS, 1, 1024, 8))
    assert "scf.for" not in ttgir_of(LAYER_BF16, 8 * 1024, Tile(Pipeline.TWO_PASS, 1, 1024, 8))
    assert "scf.for" in ttgir_of(QUANT, 32768, Tile(Pipeline.TWO_PASS, 1, 8192, 32))


@pytest.mark.parametrize("n", [9432, 13312, 26952, 53952])
@pytest.mark.parametrize("mode", [LAYER_BF16, ADD, replace(ADD, norm=Norm.RMS)], ids=lambda mode: mode.name)
def test_rows_that_are_read_again_spill_next_to_nothing(mode: Mode, n: int) -> None:
    """With tiles that were measured, and a residual of fp32.

    Of five chunks and more with an add some is spilled, and that is faster all the same: LayerNorm of 114792 columns
    takes an H200 375 us with 312 bytes spilled, and 390 with its chunks one by one.
    """
    tile = dict(instance(mode, n).tiles)[SM_90.arch].large
    usage(compiled(mode, n, tile=tile, operands=torch.bfloat16)).assert_fits(tile, most_stack=32)


TOKENS, HEADS, ALL_HEADS = 16, 32, 48
MANY = 8192 * HEADS

WIDE = re.compile(r"(?:ld|st)\.global[\w.:]*\.v4|global_(?:load|store)_dwordx4")
# What a division of 64 bits comes to, or one of 32.
DIVISION = re.compile(r"\bdiv\.[su](?:32|64)|v_rcp_iflag")


def compiled_call(function: str, m: int, x: torch.Tensor, target: Target = SM_90, **given: Any) -> Any:
    """The kernel that walks the rows of a call, of so many rows."""
    n, per_row = x.shape[-1], torch.empty(x.shape[:-1])
    given |= {"x": x, "weight": torch.empty(n, dtype=x.dtype)}
    if function.endswith("bwd"):
        given = {"dy": torch.empty(x.shape, dtype=x.dtype), "wants": ("dx", "dweight"), "rstd": per_row, **given}
        given |= {"mean": per_row} if function.startswith("layer") else {}
    launcher = Plan(check(function, given), (), target).prepared(m).launchers[0]
    return compile_for(launcher.key, launcher.kernel, target)


def text(binary: Any) -> str:
    return str(binary.asm.get("ptx") or binary.asm["amdgcn"])


def heads(n: int) -> torch.Tensor:
    return torch.empty(TOKENS, ALL_HEADS * n, dtype=torch.bfloat16)[:, : HEADS * n].view(TOKENS, HEADS, n)


# The tensors that lie on two strides besides x, or on three.
CASES: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    "rmsnorm2d_fwd": lambda x: {"out": x},
    "layernorm2d_fwd": lambda x: {},
    "rmsnorm2d_bwd": lambda x: {"dy": torch.empty(1, HEADS, TOKENS, x.shape[-1], dtype=x.dtype)[0].transpose(0, 1)},
    "layernorm2d_bwd": lambda x: {"dy": x},
}


@pytest.mark.parametrize("m", [MANY, pytest.param(8, marks=THOROUGH)], ids=["many", "few"])
@pytest.mark.parametrize("n", [128, *[pytest.param(n, marks=THOROUGH) for n in (64, 256)]])
@pytest.mark.parametrize("function", CASES)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_heads_are_moved_as_rows_of_one_stride_are(target: Target, function: str, n: int, m: int) -> None:
    x = heads(n)
    plain = compiled_call(function, m, x[:, 0], target)
    walked = compiled_call(function, m, x, target, **CASES[function](x))
    assert len(WIDE.findall(text(walked))) == len(WIDE.findall(text(plain)))
    assert not DIVISION.search(text(walked))
    if target.is_nvidia:
        assert usage(walked).local == 0
        # A multiprocessor holds as many programs.
        assert usage(walked).registers <= max(usage(plain).registers + 8, 64)


def test_rows_beyond_an_i32_are_divided() -> None:
    """Their reciprocal would not be exact."""
    assert DIVISION.search(text(compiled_call("rmsnorm2d_fwd", MOST_ROWS_IN_I32 + 1, heads(128))))


def test_three_strides_and_one_are_one_kernel_each() -> None:
    """Sizes and strides are arguments, so that other ones compile nothing."""

    def keys(x: torch.Tensor) -> set[Any]:
        plan = Plan(check("rmsnorm2d_fwd", {"x": x}), (), SM_90)
        return {launcher.key for launcher in plan.prepared(MANY).launchers}

    one, two = keys(heads(128)[:, 0]), keys(heads(128))
    three = keys(torch.empty(2, HEADS, TOKENS, 128, dtype=torch.bfloat16).transpose(1, 2))
    assert len(one | two | three) == 3
    assert two == keys(torch.empty(5, 9 * 128, dtype=torch.bfloat16)[:, : 7 * 128].view(5, 7, 128))
    # A jump back too: that of a transposed tensor.
    assert two == keys(torch.empty(HEADS, TOKENS, 128, dtype=torch.bfloat16).transpose(0, 1))


N = 1504
TILES = {
    Pipeline.ROWS: Tile(Pipeline.ROWS, 2, 2048, 4),
    Pipeline.ONE_PASS: Tile(Pipeline.ONE_PASS, 1, 1024, 4),
    Pipeline.TWO_PASS: Tile(Pipeline.TWO_PASS, 2, 512, 4),
    Pipeline.SPREAD: Tile(Pipeline.SPREAD, 2, 512, 4, held=2),
}
MODES = [*map(Mode.from_name, ("ln_fwd_bf16_mv", "rms_fwd_fp16_int8_addst_sdq", "ln_bwd_bf16_addst"))]
KERNELS = [
    (mode, pipeline, part) for mode in MODES for pipeline in mode.pipelines for part in emit.parts(mode, pipeline)
]

ACCESS = re.compile(r"\b(?:ld|st|atom|red)\.(?!param)\S*global")
WAIT, ADMIT = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def ptx_of(mode: Mode, pipeline: Pipeline, part: Pipeline | Part, target: Target = SM_90) -> str:
    # Rows of odd length start anywhere, and are longer than a window for the kernel that reads them twice.
    n = 5 * N + 1 if part is Part.UNALIGNED else N + (part is Part.WINDOW)
    return str(compiled(mode, n, target, TILES[pipeline], part).asm["ptx"])


@COSTLY
@pytest.mark.parametrize(("mode", "pipeline", "part"), KERNELS, ids=[mode.kernel(part) for mode, _, part in KERNELS])
def test_nothing_is_read_or_written_before_the_launch_ahead_has_ended(
    mode: Mode, pipeline: Pipeline, part: Pipeline | Part
) -> None:
    texts = {target.arch: ptx_of(mode, pipeline, part, target) for target in NVIDIA}
    # Ampere has no such launch, and a cooperative one is none.
    assert WAIT not in texts["sm_80"]
    for name in ("sm_90", "sm_100"):
        text = texts[name]
        assert text.count(WAIT) == (part is not Pipeline.SPREAD)
        assert text.find(WAIT) < there(ACCESS.search(text)).start()


def test_partial_sums_are_not_read_before_they_are_there() -> None:
    keys = compile_keys([N], ["ln_bwd_bf16"], arch="sm_90", rows=["few"])
    (key,) = [key for key in keys if key.key.symbol == "sum_partials"]
    text = compile_for(key.key, key.function, SM_90).asm["ptx"]
    assert text.count(WAIT) == 1
    assert text.index(WAIT) < there(ACCESS.search(text)).start()


ADMITTING = [(pipeline, part) for mode, pipeline, part in KERNELS if mode.is_backward and part is not Pipeline.SPREAD]


@pytest.mark.parametrize(("pipeline", "part"), ADMITTING, ids=[part.value for _, part in ADMITTING])
def test_a_backward_kernel_admits_the_next_one_before_it_leaves_its_sums(
    pipeline: Pipeline, part: Pipeline | Part
) -> None:
    """Every program comes there once, whatever rows it had: the next kernel waits for the last."""
    text = ptx_of(MODES[2], pipeline, part)
    assert text.count(ADMIT) == 1
    assert text.index(WAIT) < text.index(ADMIT) < text.rindex("st.global")
