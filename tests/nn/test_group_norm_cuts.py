"""GroupNorm however x is cut: any shape with any tile, forward and backward, by the numbers."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from normforge.codegen.groups import Activation, GroupMode
from normforge.codegen.instance import Tile
from normforge.codegen.tile_limits import why_not
from normforge.codegen.tiling import class_of, standard_ladder
from normforge.codegen.values import Direction, DType, Pipeline

from ..thorough import THOROUGH
from .groups import group, hold, tiled

# (samples, groups, channels of a group, positions): small, so that tiles are many and few of them are full.
SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 6), st.integers(1, 20)).filter(
    lambda shape: shape[2] * shape[3] >= 8
)
PARTS = st.builds(
    lambda runs, block, held: Tile(Pipeline.TWO_PASS, runs, block, 1, held=held),
    st.sampled_from((1, 2, 16)),
    st.sampled_from((8, 16)),
    st.sampled_from((2, 4)),
)
WHOLE = st.builds(lambda block: Tile(Pipeline.ONE_PASS, 1, block, 8), st.sampled_from((16, 64)))


@THOROUGH
# The second tile of the second run is of a fourth channel, which is the next group's first.
@example((1, 2, 3, 8), Tile(Pipeline.TWO_PASS, 1, 8, 1, held=2), False, Activation.NONE)
# The positions fill both tiles, and the channels leave half of the second empty.
@example((1, 1, 3, 4), Tile(Pipeline.TWO_PASS, 1, 8, 1, held=2), False, Activation.NONE)
@settings(max_examples=24, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SHAPES, st.one_of(PARTS, PARTS, WHOLE), st.booleans(), st.sampled_from(Activation))
def test_any_cut(shape: tuple[int, int, int, int], tile: Tile, channels_last: bool, activation: Activation) -> None:
    samples, groups, channels, positions = shape
    n, bucket = channels * positions, standard_ladder()[0]
    case = group(
        (samples, groups * channels, positions), groups, channels_last=channels_last, activation=activation.value
    )
    for direction in Direction:
        mode = GroupMode(DType.FP32, direction, activation, channels_last)
        assert why_not(class_of(mode), bucket, tile, "sm_90") is None
        torch.manual_seed(prod(shape))
        with tiled(mode, n, tile):
            hold(case)
