"""What a kernel is told of its row strides: the largest power of two, up to 16, that divides them all."""

from __future__ import annotations

import pytest
import torch

from normforge.kernels import row_alignment

from .calls import check


@pytest.mark.parametrize(
    ("strides", "alignment"),
    [
        ((4096,), 16),
        ((1000,), 8),
        ((4104, 4096), 8),
        ((4096, 4100), 4),
        ((1002, 0), 2),
        ((0, 0, 48), 16),
        ((4096, 4099), 1),
        ((1,), 1),
    ],
)
def test_alignment(strides: tuple[int, ...], alignment: int) -> None:
    assert row_alignment(*strides) == alignment


@pytest.mark.parametrize("stride", [1000, 1004, 1006, 1009, 1024])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_rows_of_any_stride_are_found(norm: str, stride: int) -> None:
    check(norm, torch.randn(5, stride, dtype=torch.bfloat16)[:, :999])
