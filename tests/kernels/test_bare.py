"""Kernels alone, in the interpreter: rows that programs share, that start anywhere or are read twice, and backward."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from normforge import LayerNormOutput, reference
from normforge.codegen.model import Mode
from normforge.codegen.tiling import VECTOR, power_of_two
from normforge.codegen.values import Cast, DType, Norm, Part, Pipeline
from normforge.dtypes import TORCH_DTYPES

from .bare import EMPTY, EPS, check_forward, check_gradients, hard_rows, run_backward, run_forward, run_team, saved

# Untyped, as everything generated; Triton looks a device function up by the name it is called by.
primitives = import_module("normforge.generated.primitives")
publish = primitives.publish

BLOCK, HELD = 64, 2
MODES = [
    *("ln_fwd_bf16", "ln_fwd_bf16_cbw", "ln_fwd_fp16_mv", "rms_fwd_bf16", "rms_fwd_bf16_cbw", "rms_fwd_fp16_mv"),
    *("rms_fwd_bf16_addst_mv", "rms_fwd_fp16_add"),
]


def run(
    mode: Mode, teams: int, x: torch.Tensor, vectors: dict[str, torch.Tensor], *, paired: bool = False
) -> LayerNormOutput:
    m, n = x.shape
    slices = -(-n // (BLOCK * HELD))
    cut = {"BLOCK": BLOCK, "HELD": HELD, "PEERS": power_of_two(slices), "PAIRED": paired}

    def launch(exchange: dict[str, torch.Tensor]) -> LayerNormOutput:
        given = vectors | {"x": x} | exchange
        if mode.fadd.stores:
            # In place, where a row that another team has stored is loaded once more for nothing.
            given["residual"] = given["residual_out"] = vectors["residual"].clone()
        return run_forward(mode, Pipeline.SPREAD, (slices, teams), given, cut)

    return run_team(launch, slices, m)


@pytest.mark.parametrize("mode", map(Mode.from_name, MODES), ids=MODES)
@pytest.mark.parametrize(
    ("n", "m", "teams", "paired"),
    [
        *((1, 1, 1, False), (100, 7, 3, True), (100, 5, 5, False), (128, 9, 2, True)),
        *((129, 4, 3, False), (300, 7, 2, True), (512, 3, 1, True), (1000, 5, 4, False)),
    ],
)
def test_a_team_publishes_what_its_rows_need(n: int, m: int, teams: int, paired: bool, mode: Mode) -> None:
    """One slice a row, then ragged last slices of 1, 44 and 104 columns, and a row of whole ones."""
    dtype = TORCH_DTYPES[mode.dtype_in]
    x = (torch.randn(m, n + (4 if paired else 3)) * 2 + 5).to(dtype)[:, :n]
    # Operands in 16 bits are read in pairs as well.
    other = dtype if paired else torch.float32
    names = ("weight", "bias") if mode.norm.centres else ("weight",)
    vectors = {name: torch.randn(n).to(other) for name in names}
    if mode.fadd.adds:
        vectors["residual"] = torch.randn(m, n + 2).to(other)[:, :n]
    check_forward(run(mode, teams, x, vectors, paired=paired), mode, x, vectors)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16], ids=lambda dtype: dtype.value)
def test_a_row_of_1e4_and_the_noise_that_16_bits_leave(dtype: DType) -> None:
    """A mean that is published is rounded to fp32: that is 5e-4 at 1e4, where fp16 steps by 8 and bf16 by 64."""
    mode, step = Mode(Norm.LAYER, dtype, dtype, save_mv=True), {DType.FP16: 8.0, DType.BF16: 64.0}[dtype]
    x = (10048.0 + step * torch.randint(-1, 2, (2, 1000))).to(TORCH_DTYPES[dtype])
    check_forward(run(mode, 1, x, {}), mode, x, {})


def _publish_bits(first_ptr: Any, second_ptr: Any, slots_ptr: Any, COUNT: tl.constexpr) -> None:
    at = tl.arange(0, COUNT)
    publish(slots_ptr + at, tl.load(first_ptr + at), tl.load(second_ptr + at), None)


publish_bits: Any = triton.jit(_publish_bits)


def test_no_two_values_look_like_an_empty_slot() -> None:
    """NaNs of all ones, which x86 and some GPUs hand on from an input, would make a team wait for ever."""
    ones = torch.full((4,), -1, dtype=torch.int32).view(torch.float32)
    plain = torch.tensor([0.0, 1.0, float("nan"), float("-inf")])
    for first, second in ((ones, ones), (ones, plain), (plain, ones), (plain, plain)):
        slots = torch.full((4,), EMPTY)
        publish_bits[(1,)](first, second, slots, 4)
        assert bool((slots != EMPTY).all())
        found = slots.view(torch.float32).view(4, 2).unbind(-1)
        torch.testing.assert_close(found, (first, second), equal_nan=True, rtol=0, atol=0)


# Enough rows for each distance from a vector's start, and, on VECTOR programs, for one that takes three.
PART_OF_ROWS = 2 * VECTOR + 1
UNTOUCHED = 77.0

# (N, row stride, BLOCK): rows of many chunks and of one, that adjoin and that do not, shorter than a vector, and of
# whole vectors.
SHAPES = (
    (1027, 1027, 256),
    (1027, 1029, 2048),
    (37, 37, 16),
    (37, 39, 64),
    (512, 513, 128),
    (505, 507, 128),
    (8, 9, 16),
    (3, 5, 16),
    (1, 1, 16),
)


def rows_in(memory: torch.Tensor, first: int, n: int, stride: int) -> torch.Tensor:
    return memory.as_strided((PART_OF_ROWS, n), (stride, 1), first)


def run_anywhere(
    mode: Mode,
    shape: tuple[int, int, int],
    guard: int,
    vectors: dict[str, torch.Tensor],
    programs: int = PART_OF_ROWS,
    part: Part = Part.WINDOW,
) -> tuple[torch.Tensor, torch.Tensor]:
    n, stride, block = shape
    elements = 2 * guard + (PART_OF_ROWS - 1) * stride + n
    x_memory = torch.full((elements,), float("nan"), dtype=TORCH_DTYPES[mode.dtype_in])
    y_memory = torch.full((elements,), UNTOUCHED, dtype=TORCH_DTYPES[mode.dtype_out])
    x, y = rows_in(x_memory, guard, n, stride), rows_in(y_memory, guard, n, stride)
    x.copy_(torch.randn(PART_OF_ROWS, n) * 3 + 1)
    given, constants = vectors | {"x": x, "y": y}, {"BLOCK": block, "VECTOR": VECTOR}
    made = run_forward(mode, part, (programs,), given, constants)
    check_forward(made, mode, x, vectors)
    beside = torch.ones(elements, dtype=torch.bool)
    rows_in(beside, guard, n, stride).fill_(False)
    assert bool((y_memory[beside] == UNTOUCHED).all())
    return x, y


@pytest.mark.parametrize(
    ("part", "save_mv", "programs", "vector_dtype", "out"),
    [
        (Part.WINDOW, False, PART_OF_ROWS, torch.float32, None),
        (Part.WINDOW, True, VECTOR, torch.bfloat16, None),
        (Part.WINDOW, False, VECTOR, torch.float16, None),
        (Part.WINDOW, False, PART_OF_ROWS, torch.float32, DType.FP32),
        # Alone in their memory: nothing is before the first row, and nothing but a vector's rest after the last.
        (Part.WINDOW, False, PART_OF_ROWS, None, None),
        (Part.UNALIGNED, True, PART_OF_ROWS, torch.bfloat16, None),
        (Part.UNALIGNED, False, PART_OF_ROWS, None, None),
    ],
    ids=["", "mv", "fp16_vectors", "fp32_y", "alone", "read_twice", "read_twice_alone"],
)
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("norm", Norm, ids=lambda norm: norm.value)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_rows_are_right_and_what_is_beside_them_stays(
    shape: tuple[int, int, int],
    norm: Norm,
    dtype: DType,
    part: Part,
    save_mv: bool,
    programs: int,
    vector_dtype: torch.dtype | None,
    out: DType | None,
) -> None:
    names = ("weight", "bias") if norm.centres else ("weight",)
    vectors = {name: torch.randn(shape[0], dtype=vector_dtype) for name in names if vector_dtype}
    guard = 2 * VECTOR if vectors else 0
    run_anywhere(Mode(norm, dtype, out or dtype, save_mv=save_mv), shape, guard, vectors, programs, part)


@pytest.mark.parametrize("part", [Part.WINDOW, Part.UNALIGNED], ids=lambda part: part.value)
@pytest.mark.parametrize("shape", [(8, 9, 16), (505, 507, 128)], ids=["ends", "between"])
def test_rows_are_rounded_before_the_weight(shape: tuple[int, int, int], part: Part) -> None:
    """Of short rows nearly all is in the vectors at the ends, of long ones between them."""
    # In bf16 the interpreter cuts where hardware rounds.
    mode = Mode(Norm.LAYER, DType.FP16, DType.FP16, cast=Cast.BEFORE_WEIGHT)
    weight = torch.randn(shape[0])
    x, y = run_anywhere(mode, shape, 2 * VECTOR, {"weight": weight}, part=part)
    rows = x.double() - x.double().mean(-1, keepdim=True)
    h = rows * (rows.square().mean(-1, keepdim=True) + EPS).rsqrt()
    # To the bit, but where the last bit of a sum tips a rounding.
    assert (y != (h.to(y.dtype).float() * weight).to(y.dtype)).float().mean() < 0.02


CHUNK = 256


def run_twice(mode: Mode, x: torch.Tensor, held: int, vectors: dict[str, torch.Tensor]) -> LayerNormOutput:
    """Read rows twice, some chunks of which are held; -1 is for rows that start anywhere."""
    part = Part.UNALIGNED if held < 0 else Pipeline.TWO_PASS
    return run_forward(mode, part, (len(x),), vectors | {"x": x}, {"BLOCK": CHUNK, "HELD": held, "VECTOR": VECTOR})


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("norm", Norm, ids=lambda norm: norm.value)
@pytest.mark.parametrize(
    ("n", "held"),
    [(1, 0), (100, 0), (256, 0), (256, 1), (257, 1), (512, 2), (1000, 0), (1000, 1), (1000, 2), (1024, 2)],
)
def test_chunks_that_are_kept_and_chunks_that_are_read_again(n: int, held: int, norm: Norm, dtype: DType) -> None:
    x = (torch.randn(3, n + 5) * 2 - 1).to(TORCH_DTYPES[dtype])[:, :n]
    vectors = {"weight": torch.randn(n)} | ({"bias": torch.randn(n)} if norm.centres else {})
    mode = Mode(norm, dtype, dtype, save_mv=True)
    check_forward(run_twice(mode, x, held, vectors), mode, x, vectors)


@pytest.mark.parametrize(
    ("dtype", "n", "held"),
    [
        *((DType.FP32, *cut) for cut in ((200, 0), (600, 0), (600, 1), (1000, 2), (5000, 1), (16384, 0))),
        # Rows that several programs share; no table spreads those of fp32.
        *((dtype, n, None) for dtype in (DType.FP16, DType.BF16) for n in (1, 5, 128, 131, 1000)),
        *((DType.BF16, n, -1) for n in (1, 5, 131, 601, 5001)),
    ],
)
@pytest.mark.parametrize("name", hard_rows(1))
def test_moments_of_rows_that_cancel(name: str, dtype: DType, n: int, held: int | None) -> None:
    """A lane of the longest row adds up 64 values; 5e-6 is some eighty roundings."""
    x = hard_rows(n, 1e6 if dtype is DType.FP32 else 5e4)[name].to(TORCH_DTYPES[dtype]).repeat(3, 1)
    mode = Mode(Norm.LAYER, dtype, dtype, save_mv=True)
    actual: Any = run(mode, 1, x, {}) if held is None else run_twice(mode, x, held, {})
    expected: Any = reference.layernorm2d_fwd(x.double(), eps=EPS, save_mv=True)
    assert (actual.rstd / expected.rstd - 1).abs().max() < 5e-6
    assert (actual.mean - expected.mean).abs().max() <= 1e-6 * x.abs().max()
    if dtype is DType.FP32:
        assert (actual.y - expected.z).abs().max() <= 5e-6 * expected.z.abs().max() + 1e-6


BACKWARD_MODES = [
    f"{norm}_bwd_{rest}" for norm in ("ln", "rms") for rest in ("fp16_xb_addst", "bf16", "bf16_cbw", "fp32_addst")
]


def draw(mode: Mode, m: int, n: int, dy: torch.dtype, lacks: str) -> dict[str, torch.Tensor]:
    """Operands whose rows are a multiple of 2 apart, another for each, and the statistics of a forward call."""
    dtype = TORCH_DTYPES[mode.dtype_in]
    tensors = {
        "x": (torch.randn(m, n + 2) * 2 + 1).to(dtype)[:, :n],
        "dy": torch.randn(m, n + 4).to(dy)[:, :n],
        "weight": torch.randn(n).to(dtype),
    }
    if mode.x_bias:
        tensors["x_bias"] = torch.randn(n)
    if mode.fadd.stores:
        tensors["dresidual_out"] = torch.randn(m, n + 6).to(dtype)[:, :n]
    tensors.pop(lacks, None)
    return tensors | saved(mode, tensors["x"], tensors.get("x_bias"))


def launches() -> Iterator[tuple[Pipeline, dict[str, Any], int, int, int, torch.dtype, str]]:
    """Yield a pipeline, its constants, numbers of rows, columns and programs, dy's dtype, and what a call lacks."""
    for m, n, programs, stages in (
        *((1, 64, 1, 1), (1, 50, 1, 3), (7, 100, 3, 1)),
        *((7, 100, 3, 3), (5, 128, 5, 2), (9, 130, 2, 4)),
    ):
        # Fewer rows than are on their way, as many, and more; a dy of fp32 is not read in pairs, whatever x is.
        for paired, dy in product((False, True), (torch.float32, torch.bfloat16)):
            yield Pipeline.ONE_PASS, {"BLOCK": 64, "STAGES": stages, "PAIRED": paired}, m, n, programs, dy, ""
    for m, n, programs in ((1, 100, 1), (9, 100, 2), (17, 128, 3), (5, 33, 5), (6, 7, 1)):
        # In one chunk or several, of which the last may be ragged, and with rows beyond the last.
        for rows, block in ((4, 128), (4, 32), (8, 16)):
            yield Pipeline.ROWS, {"ROWS": rows, "BLOCK": block}, m, n, programs, torch.float32, ""
    for m, n, teams, paired, lacks in (
        *((1, 64, 1, False, ""), (9, 37, 2, False, "weight"), (5, 40, 2, False, "dx"), (19, 50, 3, False, "")),
        *((19, 50, 3, True, ""), (5, 65, 1, False, "weight"), (11, 300, 2, False, "")),
        *((8, 256, 2, False, ""), (11, 300, 2, True, "")),
    ):
        for rows in (2, 4):
            cut, dy = {"ROWS": rows, "BLOCK": 64, "PAIRED": paired}, torch.float16 if paired else torch.float32
            yield Pipeline.SPREAD, cut, m, n, min(teams, -(-m // rows)), dy, lacks


@pytest.mark.parametrize(("pipeline", "cut", "m", "n", "programs", "dy", "lacks"), [*launches()])
@pytest.mark.parametrize("mode", map(Mode.from_name, BACKWARD_MODES), ids=BACKWARD_MODES)
def test_gradients(
    pipeline: Pipeline, cut: dict[str, Any], m: int, n: int, programs: int, dy: torch.dtype, lacks: str, mode: Mode
) -> None:
    operands = draw(mode, m, n, dy, lacks)
    dx = torch.full((m, n), float("nan"), dtype=TORCH_DTYPES[mode.dtype_in])
    given = operands if lacks == "dx" else operands | {"dx": dx}
    if pipeline is Pipeline.SPREAD:
        slices, rows = -(-n // cut["BLOCK"]), -(-m // cut["ROWS"]) * cut["ROWS"]
        constants = cut | {"PEERS": power_of_two(slices)}
        found = run_team(
            lambda exchange: run_backward(mode, pipeline, (slices, programs), given | exchange, constants), slices, rows
        )
    else:
        found = run_backward(mode, pipeline, (programs,), given, cut)
    check_gradients(found, mode, operands)
