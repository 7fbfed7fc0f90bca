"""Backward kernels that hold rows in registers, in the interpreter: rows on their way, in pairs, and in chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normforge.codegen.model import Mode
from normforge.codegen.values import Direction, DType, FusedAdd, Pipeline
from normforge.dtypes import TORCH_DTYPES

from ..norms import FULL
from .bare import check_gradients, run_backward, saved
from .rendering import kernel_of

BLOCK = 64

MODES = [
    Mode(norm, dtype, dtype, fadd, x_bias=x_bias, direction=Direction.BACKWARD)
    for norm in FULL
    for dtype, fadd, x_bias in (
        (DType.BF16, FusedAdd.NONE, False),
        (DType.FP16, FusedAdd.PRE_ADD_STORE, True),
        (DType.FP32, FusedAdd.NONE, False),
    )
]


def draw(mode: Mode, m: int, n: int, dy: torch.dtype) -> dict[str, torch.Tensor]:
    """Operands whose rows are a multiple of 2 apart, and the statistics that a forward call would have saved."""
    dtype = TORCH_DTYPES[mode.dtype_in]
    tensors = {"x": (torch.randn(m, n + 2) * 2 + 1).to(dtype)[:, :n], "dy": torch.randn(m, n).to(dy)}
    tensors["weight"] = torch.randn(n).to(dtype)
    if mode.x_bias:
        tensors["x_bias"] = torch.randn(n)
    if mode.fadd.stores:
        tensors["dresidual_out"] = torch.randn(m, n).to(dtype)
    return tensors | saved(mode, tensors["x"], tensors.get("x_bias"))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("paired", [False, True], ids=["", "paired"])
@pytest.mark.parametrize(
    ("m", "n", "programs", "stages"),
    [(1, 64, 1, 1), (1, 50, 1, 3), (7, 100, 3, 1), (7, 100, 3, 3), (5, 128, 5, 2), (9, 130, 2, 4)],
)
def test_rows_in_turn(m: int, n: int, programs: int, stages: int, paired: bool, mode: Mode, package: Path) -> None:
    """Fewer rows than are on their way, as many, and more; a dy of fp32 is not read in pairs, whatever x is."""
    for dy in (torch.float32, torch.bfloat16):
        operands = draw(mode, m, n, dy)
        dx = torch.full((m, n), float("nan"), dtype=TORCH_DTYPES[mode.dtype_in])
        cut = {"BLOCK": BLOCK, "STAGES": stages, "PAIRED": paired}
        kernel = kernel_of(package, mode, Pipeline.ONE_PASS)
        check_gradients(run_backward(kernel, (programs,), mode, operands | {"dx": dx}, cut), mode, operands)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize(("rows", "block"), [(4, 128), (4, 32), (8, 16)])
@pytest.mark.parametrize(("m", "n", "programs"), [(1, 100, 1), (9, 100, 2), (17, 128, 3), (5, 33, 5), (6, 7, 1)])
def test_tiles_of_rows_in_turn(m: int, n: int, programs: int, rows: int, block: int, mode: Mode, package: Path) -> None:
    """In one chunk or several, of which the last may be ragged, and with rows beyond the last."""
    operands = draw(mode, m, n, torch.float32)
    dx = torch.full((m, n), float("nan"), dtype=TORCH_DTYPES[mode.dtype_in])
    kernel = kernel_of(package, mode, Pipeline.ROWS)
    cut = {"BLOCK": block, "ROWS": rows}
    check_gradients(run_backward(kernel, (programs,), mode, operands | {"dx": dx}, cut), mode, operands)
