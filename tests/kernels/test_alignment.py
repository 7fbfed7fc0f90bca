"""What a kernel is told of its row strides: the largest power of two, up to 16, that divides them all."""

from __future__ import annotations

import pytest

import normforge
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


@pytest.mark.parametrize(
    ("n", "rows", "pipeline"),
    [
        (4096, "many", "two_pass"),
        (4104, "many", "two_pass"),
        (4099, "many", "window"),
        (5137, "many", "window"),
        (8191, "many", "two_pass"),
        (4099, "few", "window"),
        (4096, "few", "one_pass"),
    ],
)
@pytest.mark.parametrize("norm", ["ln", "rms"])
def test_rows_that_start_anywhere_are_held_where_others_are_read_twice(
    norm: str, n: int, rows: str, pipeline: str
) -> None:
    """On sm_90: what reads a row twice reads it element by element where no vector starts it."""
    keys = normforge.compile_keys([n], [f"{norm}_fwd_bf16"], arch="sm_90", rows=[rows])
    assert [key.key.symbol for key in keys] == [f"{norm}_fwd_bf16_{pipeline}"]
