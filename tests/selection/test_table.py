"""The table that normforge comes with: what it lists is there, and each call finds its row."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import normforge
from normforge.call_kinds import MOST_ROWS_IN_I32, ROWS
from normforge.codegen.tiling import SMALL_M, SOME_M
from normforge.selection import dispatch
from normforge.selection.table import Entry, entries_of

from ..folders import distinct_tiles

TABLE = import_module("normforge.generated.dispatch").TABLE


def committed() -> tuple[Entry, ...]:
    """The committed table's entries, without what tests have generated on demand."""
    return tuple(dispatch.loaded())


def entry_of(mode: str, length: tuple[int, int], tiles: dict[str, tuple[Any, ...]], *bounds: int) -> Entry:
    """The entry of a table with one bucket, by the tiles of each architecture."""
    ladders: dict[str, Any] = {arch: ((*length, f"n{length[1]}", *each),) for arch, each in tiles.items()}
    (entry,) = entries_of("nowhere", {mode: ladders}, *bounds)
    return entry


def test_some_rows_have_a_tile_of_their_own_where_a_table_has_one() -> None:
    many, few, some = ("rows", 8, 64, 2), ("rows", 1, 64, 1), ("one_pass", 1, 64, 2)
    tiles = {"any": (many, few), "sm_90": (many, few, many, some), "gfx942": (many, few, few, some)}
    entry = entry_of("rms_fwd_fp32", (1, 64), tiles, 256, 2048)
    expected = {1: few, 256: few, 257: some, 2048: some, 2049: many, 2**31: many}
    for m, tile in expected.items():
        assert [entry.tile(m, 64, arch).row for arch in ("sm_90", "gfx942")] == [tile, tile]
        assert entry.tile(m, 64, "any").row == (few if m <= 256 else many)
        assert entry.invariant.tile(m, 64, "gfx942").row == few
    assert [ROWS[entry.size(m)] for m in expected] == ["few", "few", "some", "some", "many", "most"]
    assert list(entry.least_rows().values()) == [1, 257, 2049, MOST_ROWS_IN_I32 + 1]
    assert entry.least_rows(3000) == {"many": 3000, "most": -(-(MOST_ROWS_IN_I32 + 1) // 3000) * 3000}
    assert {tile.row for tile in distinct_tiles(entry)} == {many, few, some}


def test_many_rows_that_leave_lanes_idle_have_a_tile_of_their_own_where_a_table_has_one() -> None:
    many, few, ragged = ("two_pass", 1, 1024, 4), ("one_pass", 1, 512, 2), ("rows", 2, 256, 2)
    tiles = {"any": (many, few), "sm_90": (many, few, many, many, ragged)}
    entry = entry_of("ln_fwd_bf16", (513, 1024), tiles, 256, 2048)
    for m, n, expected in (
        (2049, 1024, many),
        (2049, 1000, many),
        (2049, 900, ragged),
        (2**31, 520, ragged),
        (2048, 520, many),
        (1, 520, few),
    ):
        assert entry.tile(m, n, "sm_90").row == expected
        assert [tile.row for tile in entry.choices(m, n, "gfx942")] == [few if m <= 256 else many] * 2
        assert entry.invariant.tile(m, n, "sm_90").row == many
    assert {tile.row for tile in distinct_tiles(entry)} == {many, few, ragged}


def test_a_table_without_tiles_for_some_rows_has_their_class_all_the_same() -> None:
    """So that a recording of calls says what another table takes."""
    assert {(entry.small_m, entry.some_m) for entry in committed()} == {(SMALL_M, SOME_M)}
    entry = entry_of("rms_fwd_fp32", (1, 64), {"any": (("rows", 8, 64, 2), ("rows", 1, 64, 1))}, SOME_M + 1)
    assert entry.some_m > SOME_M + 1


def test_every_kernel_exists_in_its_module() -> None:
    for entry in committed():
        for tile in distinct_tiles(entry):
            assert entry.load(tile.pipeline).__name__ == entry.kernel(tile.pipeline)


@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 1024, 1025, 5120, 32768, 32769, 262144, 2**31 + 1])
def test_each_row_length_has_the_entry_whose_bucket_holds_it(n: int) -> None:
    served = 0
    for mode in TABLE:
        entries = [entry for entry in committed() if entry.mode == mode]
        holding = [entry for entry in entries if entry.first <= n <= (entry.last or n)]
        assert len(holding) <= 1
        assert dispatch.loaded().find(mode, n) is (holding[0] if holding else None)
        served += len(holding)
    assert served


def test_which_takes_what_the_call_takes() -> None:
    """And no row."""
    x, weight, bias = torch.empty(0, 64), torch.empty(64), torch.empty(64)
    assert normforge.which(x, weight, bias) == normforge.which(x=x, weight=weight, bias=bias) == "ln_fwd_fp32_n128"
    with pytest.raises(TypeError, match="too many positional arguments"):
        normforge.which(x, weight, bias, norm="rms")
    with pytest.raises(TypeError, match="unexpected keyword argument 'fad'"):
        normforge.which(x, fad=1)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        normforge.which()
