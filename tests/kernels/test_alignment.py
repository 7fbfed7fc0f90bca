"""What a kernel is told of its row strides: the largest power of two, up to 16, that divides them all."""

from __future__ import annotations

import pytest

from normforge.kernels.strides import row_alignment


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
