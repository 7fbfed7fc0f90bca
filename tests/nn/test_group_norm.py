"""GroupNorm's functional form and module: what torch computes, in both layouts, forward and backward."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

import normforge
from normforge.codegen.groups import Activation, GroupMode
from normforge.codegen.instance import Tile
from normforge.codegen.tile_limits import why_not
from normforge.codegen.tiling import class_of, standard_ladder
from normforge.codegen.values import Direction, DType, Pipeline
from normforge.dtypes import DTYPES
from proving.cases import FLOATS, LAYOUTS, Case, operands

from ..calling import slices
from ..thorough import THOROUGH
from .groups import group, hold, innermost, tiled
from .models import ResidualGroups, noted


@pytest.mark.parametrize("problem", slices(Path(__file__).with_name("groups.yaml"))["results"], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_results(problem: Case, layout: str, activation: str) -> None:
    case = problem.but(layout=layout, activation=activation)
    given = operands(case)
    found = hold(case, given)
    assert found["y"].stride() == found["x"].stride() == given["x"].stride()
    assert found["y"].dtype is case["dtype"]


TILES = {
    "in registers": Tile(Pipeline.ONE_PASS, 1, 16, 1),
    "in registers, several blocks": Tile(Pipeline.ONE_PASS, 1, 64, 4),
    "parts of a run": Tile(Pipeline.TWO_PASS, 1, 16, 1, held=2),
    "parts of several": Tile(Pipeline.TWO_PASS, 2, 16, 1, held=2),
    "a part that is the group": Tile(Pipeline.TWO_PASS, 16, 16, 1, held=4),
}


def normalised(x: torch.Tensor, channels_last: bool, tile: Tile, eps: float = 1e-5) -> torch.Tensor:
    """Return a GroupNorm of two groups by a tile."""
    mode = GroupMode(DType.FP32, Direction.FORWARD, Activation.NONE, channels_last)
    with tiled(mode, x[0].numel() // 2, tile):
        return normforge.group_norm(innermost(x) if channels_last else x, 2, eps=eps)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("direction", list(Direction))
def test_tiles(tile: str, channels_last: bool, direction: Direction) -> None:
    """However groups are cut, whole or in parts, with tiles that reach beyond their channels and positions, or runs."""
    mode = GroupMode(DType.FP32, direction, Activation.SILU, channels_last)
    for shape in ((1, 12, 3, 9), (1, 20, 4, 4)):
        with tiled(mode, math.prod(shape) // 2, TILES[tile]):
            hold(group(shape, 2, channels_last=channels_last, activation="silu"))


@pytest.mark.parametrize("tile", TILES)
def test_memory_around_x_is_never_read(tile: str) -> None:
    """Six channels of four positions fill tiles of 16 by their positions, and not by their channels."""
    case = group((1, 12, 2, 2), 2)
    given = operands(case)
    around = torch.full((3, given["x"].numel()), math.nan)
    around[1] = given["x"].detach().flatten()
    given["x"] = around[1].view(given["x"].shape).requires_grad_()
    with tiled(GroupMode(DType.FP32, Direction.FORWARD, Activation.NONE, False), 24, TILES[tile]):
        hold(case, given)


def test_saved_tensors_may_come_back_at_any_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for aligned addresses read several statistics at once, which a GPU refuses at other addresses."""
    from normforge.families.group import row

    planned = noted(monkeypatch, row, "slots_of")
    case = group((2, 12, 3, 4), 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, LAYOUTS["offset"]):
        hold(case)
    assert planned[-1][1] == {"x_ptr", "weight_ptr", "mean_ptr", "rstd_ptr"}


def test_parts_of_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a part has that registers do not hold at once, and groups that are launched a few at a time."""
    from normforge.kernels import assembly, group_tiles

    monkeypatch.setattr(group_tiles, "_MOST_PARTS", 2)
    monkeypatch.setattr(assembly, "_MOST_ITEMS", 1)
    for channels_last, direction in product((False, True), Direction):
        mode = GroupMode(DType.FP32, direction, Activation.NONE, channels_last)
        with tiled(mode, 6 * 27, Tile(Pipeline.TWO_PASS, 1, 16, 1, held=2)):
            hold(group((1, 12, 3, 9), 2, channels_last=channels_last))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "tile",
    [
        Tile(Pipeline.ONE_PASS, 1, 64, 8),
        Tile(Pipeline.TWO_PASS, 1, 64, 8, held=2),
        Tile(Pipeline.TWO_PASS, 16, 64, 8, held=2),
    ],
)
def test_a_large_mean_beside_a_small_deviation(channels_last: bool, tile: Tile) -> None:
    """1e4 with deviations of 1e-2, of which E[x**2] - E[x]**2 leaves nothing."""
    x = torch.randn(1, 8, 12, 11) * 1e-2 + 1e4
    y = normalised(x, channels_last, tile, 1e-12)
    torch.testing.assert_close(y.double(), functional.group_norm(x.double(), 2, eps=1e-12), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("value", [1e20, 1e30])
def test_groups_whose_squares_overflow_are_zeros(value: float, channels_last: bool, tile: str) -> None:
    """As rows of LayerNorm are, docs/reference/numerics.md says: rstd is 0, and nothing is NaN."""
    length = 4 * 3 * 9
    signs = (-1.0) ** torch.arange(length)
    x = torch.stack([value * signs, torch.linspace(0.0, value, length)]).view(1, 8, 3, 9)
    assert torch.equal(normalised(x, channels_last, TILES[tile]), torch.zeros_like(x))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("far", [1e2, 1e4, 1e6, -3e7])
def test_a_part_whose_first_values_are_far_from_the_others(channels_last: bool, far: float) -> None:
    """Sums around a mean that is far off lose what values differ by; but then those far off are the variance.

    The first of 16 runs is far: sums of squares around its mean are at most 16 times those of all. Each takes up
    to 32 additions one after another, which round by 2**-25 or less.
    """
    x = torch.randn(1, 4, 16, 32)
    x[:, :, 0, :8] += far
    y = normalised(x, channels_last, Tile(Pipeline.TWO_PASS, 16, 16, 1, held=2))
    torch.testing.assert_close(y.double(), functional.group_norm(x.double(), 2), rtol=16 * 32 * 2**-25, atol=2e-6)


@pytest.mark.parametrize("two", [np.int64(2), np.int32(2), torch.tensor(2)], ids=["int64", "int32", "tensor"])
def test_a_number_of_groups_may_be_of_any_whole_type(two: Any) -> None:
    x = torch.randn(2, 8, 3)
    for _ in range(2):
        assert torch.equal(normforge.group_norm(x, two), normforge.group_norm(x, 2))
    assert torch.equal(normforge.GroupNorm(two, 8)(x), normforge.group_norm(x, 2))


def test_constant_groups_are_the_bias() -> None:
    x = torch.full((2, 4, 3, 3), 777.0)
    bias = torch.randn(4)
    y = normforge.group_norm(x, 2, torch.randn(4), bias)
    assert torch.equal(y, bias[:, None, None].expand_as(x))


def test_what_is_not_finite_stays_in_its_group() -> None:
    for channels_last in (False, True):
        x = torch.randn(2, 8, 3, 3)
        want = functional.group_norm(x, 4)
        x[0, 2, 1, 1] = float("nan")
        x[1, 7, 0, 0] = float("inf")
        y = normforge.group_norm(innermost(x) if channels_last else x, 4)
        hit = torch.zeros(2, 8, dtype=torch.bool)
        hit[0, 2:4] = hit[1, 6:8] = True
        assert y[hit].isnan().all()
        torch.testing.assert_close(y[~hit], want[~hit])


def test_channels_that_are_almost_innermost_stay_so() -> None:
    y = normforge.group_norm(innermost(torch.randn(2, 8, 6, 6))[:, :4], 2)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_the_module_is_torchs() -> None:
    ours, theirs = normforge.GroupNorm(4, 8, eps=1e-3), torch.nn.GroupNorm(4, 8, eps=1e-3)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 8, 5)
    torch.testing.assert_close(ours(x), theirs(x))
    assert isinstance(ours, torch.nn.GroupNorm)
    assert str(ours) == f"normforge.{theirs}"
    activated = str(torch.nn.GroupNorm(4, 8))[:-1] + ", activation=silu)"
    assert str(normforge.GroupNorm(4, 8, activation="silu")) == f"normforge.{activated}"
    assert normforge.GroupNorm(4, 8, bias=False).bias is None
    assert normforge.GroupNorm(4, 8, affine=False)(x).shape == x.shape


def test_silu_is_computed_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = ResidualGroups(), torch.randn(2, 8, 4, 4)
    weight, bias = model.first[0].parameters()
    want, norm = model(x), functional.group_norm(x, 2, weight, bias)
    swapped = normforge.patch(model).swapped
    assert [each.path for each in swapped] == ["first.0", "norm", "first"]
    monkeypatch.setattr(torch.nn.SiLU, "forward", lambda self, x: pytest.fail("SiLU was called"))
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    # The norm alone is what it was.
    torch.testing.assert_close(model.first[0](x), norm)


def test_no_positions() -> None:
    x, weight = torch.randn(2, 8, 0, requires_grad=True), torch.randn(8, requires_grad=True)
    found, want = (
        torch.autograd.grad(norm(x, 4, weight).sum(), (x, weight))
        for norm in (normforge.group_norm, functional.group_norm)
    )
    torch.testing.assert_close(found, want, equal_nan=True)


# (samples, groups, channels of a group, positions): small, so that tiles are many and few of them are full.
SIZES = st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 6), st.integers(1, 20)).filter(
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
@example((1, 2, 3, 8), Tile(Pipeline.TWO_PASS, 1, 8, 1, held=2), False, Activation.NONE, torch.float32)
# The positions fill both tiles, and the channels leave half of the second empty.
@example((1, 1, 3, 4), Tile(Pipeline.TWO_PASS, 1, 8, 1, held=2), False, Activation.NONE, torch.float32)
@settings(max_examples=48, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SIZES, st.one_of(PARTS, PARTS, WHOLE), st.booleans(), st.sampled_from(Activation), st.sampled_from(FLOATS))
def test_any_cut(
    shape: tuple[int, int, int, int], tile: Tile, channels_last: bool, activation: Activation, dtype: torch.dtype
) -> None:
    samples, groups, channels, positions = shape
    n, bucket = channels * positions, standard_ladder()[0]
    images = (samples, groups * channels, positions)
    case = group(images, groups, channels_last=channels_last, activation=activation.value, dtype=dtype)
    for direction in Direction:
        mode = GroupMode(DTYPES[dtype], direction, activation, channels_last)
        assert why_not(class_of(mode), bucket, tile, "sm_90") is None
        torch.manual_seed(math.prod(shape))
        with tiled(mode, n, tile):
            hold(case)
