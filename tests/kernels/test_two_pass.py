"""The forward kernel that reads a row twice, in the interpreter: chunks it keeps, and rows whose moments cancel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normforge import LayerNormOutput, reference
from normforge.codegen.model import Mode
from normforge.codegen.values import DType, Norm, Pipeline
from normforge.dtypes import TORCH_DTYPES

from .bare import EPS, check_forward, run_forward
from .rendering import kernel_of

BLOCK = 256


def run_two_pass(
    package: Path, mode: Mode, x: torch.Tensor, held: int, vectors: dict[str, torch.Tensor]
) -> LayerNormOutput:
    kernel = kernel_of(package, mode, Pipeline.TWO_PASS)
    return run_forward(kernel, (len(x),), mode, vectors | {"x": x}, {"BLOCK": BLOCK, "HELD": held})


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("norm", Norm, ids=lambda norm: norm.value)
@pytest.mark.parametrize(
    ("n", "held"),
    [(1, 0), (100, 0), (256, 0), (256, 1), (257, 1), (512, 2), (1000, 0), (1000, 1), (1000, 2), (1024, 2)],
)
def test_chunks_that_are_kept_and_chunks_that_are_read_again(
    n: int, held: int, norm: Norm, dtype: DType, package: Path
) -> None:
    x = (torch.randn(3, n + 5) * 2 - 1).to(TORCH_DTYPES[dtype])[:, :n]
    vectors = {"weight": torch.randn(n)} | ({"bias": torch.randn(n)} if norm.centres else {})
    mode = Mode(norm, dtype, dtype, save_mv=True)
    check_forward(run_two_pass(package, mode, x, held, vectors), mode, x, vectors)


def _with(row: torch.Tensor, at: int | slice, value: float) -> torch.Tensor:
    row[at] = value
    return row


def adversarial_rows(n: int) -> dict[str, torch.Tensor]:
    """Rows whose mean, or some of whose values, are large beside what is left when they are taken off."""
    noise = torch.randn(n)
    return {
        "offset": 1e4 + 1e-2 * noise,
        "negative_offset": -3e5 + noise,
        "constant": torch.full((n,), 12345.678),
        "zeros": torch.zeros(n),
        "outlier_at_a_lanes_start": _with(noise.clone(), 0, 1e6),
        "outlier_at_the_last_lanes_start": _with(noise.clone(), min(BLOCK, n) - 1, -1e6),
        "outlier_in_the_second_chunk": _with(noise.clone(), min(BLOCK, n - 1), 1e6),
        "outlier_at_the_end": _with(noise.clone(), n - 1, 1e6),
        "every_lane_starts_far_away": _with(1e-2 * noise, slice(BLOCK), 1e4),
        "half_the_lanes_start_far_away": _with(noise.clone(), slice(BLOCK // 2), 1e5),
        "two_levels": torch.where(torch.arange(n) % 2 == 0, 1e4, -1e4) + 1e-2 * noise,
    }


@pytest.mark.parametrize(("n", "held"), [(200, 0), (600, 0), (600, 1), (1000, 2), (5000, 1), (16384, 0)])
@pytest.mark.parametrize("name", adversarial_rows(1))
def test_moments_of_rows_that_cancel(name: str, n: int, held: int, package: Path) -> None:
    """A lane of the longest row adds up 64 values; 5e-6 is some eighty roundings."""
    x = adversarial_rows(n)[name].unsqueeze(0)
    actual = run_two_pass(package, Mode(Norm.LAYER, DType.FP32, DType.FP32, save_mv=True), x, held, {})
    expected = reference.layernorm2d_fwd(x.double(), eps=EPS, save_mv=True)
    assert actual.mean is not None
    assert actual.rstd is not None
    assert expected.mean is not None
    assert expected.rstd is not None
    assert (actual.rstd / expected.rstd - 1).abs() < 5e-6
    assert (actual.mean - expected.mean).abs() <= 1e-6 * x.abs().max()
    assert (actual.y - expected.z).abs().max() <= 5e-6 * expected.z.abs().max() + 1e-6
