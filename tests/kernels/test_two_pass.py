"""The forward kernel that reads a row twice, in the interpreter: chunks it keeps, and rows whose moments cancel."""

from __future__ import annotations

import pytest
import torch

from normforge import LayerNormOutput, reference
from normforge.codegen.model import Mode
from normforge.codegen.values import DType, Norm, Pipeline
from normforge.dtypes import TORCH_DTYPES

from .bare import EPS, check_forward, hard_rows, run_forward

BLOCK = 256


def run(mode: Mode, x: torch.Tensor, held: int, vectors: dict[str, torch.Tensor]) -> LayerNormOutput:
    return run_forward(mode, Pipeline.TWO_PASS, (len(x),), vectors | {"x": x}, {"BLOCK": BLOCK, "HELD": held})


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
    check_forward(run(mode, x, held, vectors), mode, x, vectors)


@pytest.mark.parametrize(("n", "held"), [(200, 0), (600, 0), (600, 1), (1000, 2), (5000, 1), (16384, 0)])
@pytest.mark.parametrize("name", hard_rows(1))
def test_moments_of_rows_that_cancel(name: str, n: int, held: int) -> None:
    """A lane of the longest row adds up 64 values; 5e-6 is some eighty roundings."""
    x = hard_rows(n)[name].unsqueeze(0)
    actual = run(Mode(Norm.LAYER, DType.FP32, DType.FP32, save_mv=True), x, held, {})
    expected = reference.layernorm2d_fwd(x.double(), eps=EPS, save_mv=True)
    assert actual.mean is not None
    assert actual.rstd is not None
    assert expected.mean is not None
    assert expected.rstd is not None
    assert (actual.rstd / expected.rstd - 1).abs() < 5e-6
    assert (actual.mean - expected.mean).abs() <= 1e-6 * x.abs().max()
    assert (actual.y - expected.z).abs().max() <= 5e-6 * expected.z.abs().max() + 1e-6
