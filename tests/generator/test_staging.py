"""How many rows fit the shared memory that programs of a multiprocessor divide."""

from __future__ import annotations

import pytest

from normforge.codegen.tiling import most_stages


@pytest.mark.parametrize(
    ("arch", "resident", "round_bytes", "expected"),
    [
        # 228 KiB, of which each program leaves 2 alone.
        ("sm_90", 1, 226 * 1024, 2),
        ("sm_90", 1, 226 * 1024 + 1, 1),
        ("sm_90", 2, 16 * 1024, 8),
        ("sm_90", 8, 4 * 1024, 7),
        ("sm_80", 2, 16 * 1024, 6),
        ("sm_89", 2, 16 * 1024, 4),
        ("sm_90", 32, 8 * 1024, 1),
        ("sm_100", 1, 1024, 227),
        ("sm_75", 1, 1024, 1),
        ("gfx942", 1, 1024, 1),
    ],
)
def test_as_many_stages_as_fit(arch: str, resident: int, round_bytes: int, expected: int) -> None:
    assert most_stages(arch, resident, round_bytes) == expected
