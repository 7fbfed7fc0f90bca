"""The kernel for rows that start anywhere, in the interpreter: it reads beside a row, and writes nothing there."""

from __future__ import annotations

import pytest
import torch

from normforge.codegen.model import Mode
from normforge.codegen.values import Cast, DType, Norm, Part
from normforge.dtypes import TORCH_DTYPES

from .bare import EPS, check_forward, run_forward

VECTOR = 8
# Enough rows for each distance from a vector's start, and, on VECTOR programs, for one that takes three.
ROWS = 2 * VECTOR + 1
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
    return memory.as_strided((ROWS, n), (stride, 1), first)


def run_window(
    mode: Mode,
    shape: tuple[int, int, int],
    guard: int,
    vectors: dict[str, torch.Tensor],
    programs: int = ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    n, stride, block = shape
    elements = 2 * guard + (ROWS - 1) * stride + n
    x_memory = torch.full((elements,), float("nan"), dtype=TORCH_DTYPES[mode.dtype_in])
    y_memory = torch.full((elements,), UNTOUCHED, dtype=TORCH_DTYPES[mode.dtype_out])
    x, y = rows_in(x_memory, guard, n, stride), rows_in(y_memory, guard, n, stride)
    x.copy_(torch.randn(ROWS, n) * 3 + 1)
    given, constants = vectors | {"x": x, "y": y}, {"BLOCK": block, "VECTOR": VECTOR}
    made = run_forward(mode, Part.WINDOW, (programs,), given, constants)
    check_forward(made, mode, x, vectors)
    beside = torch.ones(elements, dtype=torch.bool)
    rows_in(beside, guard, n, stride).fill_(False)
    assert bool((y_memory[beside] == UNTOUCHED).all())
    return x, y


@pytest.mark.parametrize(
    ("save_mv", "programs", "vector_dtype", "out"),
    [
        (False, ROWS, torch.float32, None),
        (True, VECTOR, torch.bfloat16, None),
        (False, VECTOR, torch.float16, None),
        (False, ROWS, torch.float32, DType.FP32),
        # Alone in their memory: nothing is before the first row, and nothing but a vector's rest after the last.
        (False, ROWS, None, None),
    ],
    ids=["", "mv", "fp16_vectors", "fp32_y", "alone"],
)
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("norm", Norm, ids=lambda norm: norm.value)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_rows_are_right_and_what_is_beside_them_stays(
    shape: tuple[int, int, int],
    norm: Norm,
    dtype: DType,
    save_mv: bool,
    programs: int,
    vector_dtype: torch.dtype | None,
    out: DType | None,
) -> None:
    names = ("weight", "bias") if norm.centres else ("weight",)
    vectors = {name: torch.randn(shape[0], dtype=vector_dtype) for name in names if vector_dtype}
    guard = 2 * VECTOR if vectors else 0
    run_window(Mode(norm, dtype, out or dtype, save_mv=save_mv), shape, guard, vectors, programs)


@pytest.mark.parametrize("shape", [(8, 9, 16), (505, 507, 128)], ids=["ends", "between"])
def test_rows_are_rounded_before_the_weight(shape: tuple[int, int, int]) -> None:
    """Of short rows nearly all is in the vectors at the ends, of long ones between them."""
    # In bf16 the interpreter cuts where hardware rounds.
    mode = Mode(Norm.LAYER, DType.FP16, DType.FP16, cast=Cast.BEFORE_WEIGHT)
    weight = torch.randn(shape[0])
    x, y = run_window(mode, shape, 2 * VECTOR, {"weight": weight})
    rows = x.double() - x.double().mean(-1, keepdim=True)
    h = rows * (rows.square().mean(-1, keepdim=True) + EPS).rsqrt()
    # To the bit, but where the last bit of a sum tips a rounding.
    assert (y != (h.to(y.dtype).float() * weight).to(y.dtype)).float().mean() < 0.02
