"""How rows are counted: as 32-bit integers for as long as no index can overflow."""

from __future__ import annotations

import pytest
import torch

import normforge
from normforge.call_kinds import MOST_ROWS_IN_I32
from normforge.codegen.tiling import MOST_RESIDENT_WARPS
from normforge.families.public import rmsnorm2d_bwd
from normforge.kernels.gpu import named_target, row_count_type
from normforge.selection import dispatch


def test_no_round_of_a_loop_over_rows_leaves_32_bits() -> None:
    """A loop looks two rounds ahead; a round is of as many programs as ever fit, with as many rows as any tile has."""
    tiles = [
        tile for entry in dispatch.loaded() for arch in ("any", "sm_90") for tile in entry.choices(1, entry.first, arch)
    ]
    programs = named_target("sm_100").multiprocessors * MOST_RESIDENT_WARPS
    assert MOST_ROWS_IN_I32 + 2 * programs * max(tile.rows for tile in tiles) < 2**31
    assert row_count_type(MOST_ROWS_IN_I32) == "i32"
    assert row_count_type(MOST_ROWS_IN_I32 + 1) == "i64"


@pytest.mark.parametrize(("positions", "word"), [(2**31 - 2**21, "i32"), (2**31 - 1, "i64"), (2**31, "i64")])
def test_no_position_of_the_last_tiles_of_a_group_leaves_32_bits(positions: int, word: str) -> None:
    keys = normforge.compile_keys(shapes=[f"1x1x{positions}/1"], modes=["gn_fwd_bf16"], arch="sm_90")
    assert {dict(key.key.arguments)["units"] for key in keys} == {word}


@pytest.mark.gpu
def test_gradients_of_almost_as_many_rows_as_32_bits_count() -> None:
    """One column: the next tile of the last round begins beyond 2**31."""
    m = 2**31 - 1000
    x = torch.zeros(m, 1, dtype=torch.bfloat16, device="cuda")
    x[-1] = 1
    rstd = torch.ones(m, device="cuda")
    found = rmsnorm2d_bwd(x, x, torch.ones(1, dtype=torch.bfloat16, device="cuda"), rstd=rstd, wants=("dx", "dweight"))
    assert found.dx is not None
    assert found.dweight is not None
    assert found.dweight.item() == 1
    # h is 1 and g is 1 in the last row: dx = g - h * mean(g * h) is 0 there, and everywhere.
    assert not found.dx.any()
