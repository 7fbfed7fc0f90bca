"""How x of GroupNorm is cut: every element once, whatever the shape, and a tile that fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normforge.codegen.groups import GroupMode
from normforge.codegen.instance import Tile
from normforge.codegen.tiling import GROUP_PARTS, power_of_two
from normforge.codegen.values import Direction, DType, Pipeline
from normforge.kernels.gpu import named_target
from normforge.kernels.group_tiles import Shape, choose, cut

SHAPES = st.builds(
    lambda channels, groups, positions: Shape(channels * groups, groups, positions, 2),
    st.integers(1, 200),
    st.integers(1, 64),
    st.integers(1, 10**6),
)
TILES = st.builds(
    lambda pipeline, runs, block, held: Tile(pipeline, runs, block, 8, held=held),
    st.sampled_from((Pipeline.ONE_PASS, Pipeline.TWO_PASS)),
    st.sampled_from((1, 4, 16)),
    st.sampled_from((4, 16, 1024, 4096)),
    st.sampled_from((2, 8)),
)


@given(SHAPES, TILES, st.booleans(), st.sampled_from(Direction))
def test_tiles_have_every_element_and_programs_every_tile(
    shape: Shape, tile: Tile, channels_last: bool, direction: Direction
) -> None:
    found = cut(GroupMode(DType.BF16, direction, channels_last=channels_last), shape, tile)
    assert shape.channels % found.width == 0
    # Parts of channels that are innermost sum up any channels.
    assert found.width % shape.group_channels == 0 or (channels_last and tile.pipeline is Pipeline.TWO_PASS)
    assert found.tiles == -(-found.width // found.block_c) * -(-shape.positions // found.block_s)
    assert found.block_c * found.block_s <= tile.block
    assert found.block_c == power_of_two(found.block_c)
    assert found.block_s == power_of_two(found.block_s)
    # Several groups share no tile with channels of theirs in another, and nor do some of a group's channels.
    assert found.width == shape.group_channels or found.width <= found.block_c
    assert found.parts * found.part_tiles >= found.tiles
    assert found.part_tiles % found.held == 0
    assert (found.parts - 1) * found.part_tiles < found.tiles
    # Registers hold at least two tiles of a part that has more than they hold: the first may be next to empty.
    assert found.held >= min(found.tiles, 2)


@pytest.mark.parametrize(
    ("channels", "positions", "least"),
    # With one channel a tile there are 16, 20, 40, 10 and 16.
    [(16, 48 * 48, 9), (20, 48 * 48, 15), (40, 24 * 24, 9), (10, 64 * 64, 10), (16, 56 * 56, 13)],
)
def test_tiles_of_several_channels_are_fewer(channels: int, positions: int, least: int) -> None:
    found = cut(
        GroupMode(DType.BF16), Shape(32 * channels, 32, positions, 2), Tile(Pipeline.TWO_PASS, 1, 4096, 16, 1, 4)
    )
    assert found.tiles == least
    assert found.block_c * found.block_s == 4096


def test_groups_that_do_not_fit_go_by_parts() -> None:
    tile, mode, target = Tile(Pipeline.ONE_PASS, 1, 1024, 2), GroupMode(DType.BF16), named_target("sm_90")
    assert choose(mode, Shape(64, 32, 1024, 2), (tile,), target)[0] == tile
    # Two channels of 16400 positions are 512 values a thread.
    assert choose(mode, Shape(64, 32, 16400, 2), (tile,), target)[0] == GROUP_PARTS


def test_longer_groups_leave_room_for_fewer_programs_and_then_are_read_twice() -> None:
    tile, mode, target = Tile(Pipeline.ONE_PASS, 4, 2048, 8, 3, 4), GroupMode(DType.BF16), named_target("sm_90")
    shapes = [Shape(32 * channels, 32, positions, 2) for channels, positions in ((20, 1024), (30, 1024), (20, 1023))]
    found = [(each.pipeline.value, each.resident) for each, _ in (choose(mode, s, (tile,), target) for s in shapes)]
    assert found == [("one_pass", 3), ("one_pass", 2), ("two_pass", 1)]
