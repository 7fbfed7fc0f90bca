"""Backward kernels in the interpreter: rows on their way, in pairs, in tiles, in chunks, and shared by programs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from normforge.codegen.model import Mode
from normforge.codegen.tiling import power_of_two
from normforge.codegen.values import Cast, Direction, DType, FusedAdd, Pipeline
from normforge.dtypes import TORCH_DTYPES

from ..norms import FULL
from .bare import check_gradients, run_backward, run_team, saved

MODES = [
    Mode(norm, dtype, dtype, fadd, x_bias=x_bias, direction=Direction.BACKWARD, cast=cast)
    for norm in FULL
    for dtype, fadd, x_bias, cast in (
        (DType.FP16, FusedAdd.PRE_ADD_STORE, True, Cast.AFTER_WEIGHT),
        (DType.BF16, FusedAdd.NONE, False, Cast.AFTER_WEIGHT),
        (DType.BF16, FusedAdd.NONE, False, Cast.BEFORE_WEIGHT),
        (DType.FP32, FusedAdd.PRE_ADD_STORE, False, Cast.AFTER_WEIGHT),
    )
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
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_gradients(
    pipeline: Pipeline,
    cut: dict[str, Any],
    m: int,
    n: int,
    programs: int,
    dy: torch.dtype,
    lacks: str,
    mode: Mode,
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
