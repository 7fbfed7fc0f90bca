"""GroupNorm and norms over the channels of (B, C, ...): what the formula gives, in both layouts, both ways."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import normforge
from normforge.codegen.groups import Activation, GroupMode, Span
from normforge.codegen.instance import Tile
from normforge.codegen.values import Direction, DType, Pipeline
from normforge.errors import NormforgeError
from normforge.kernels import pipelines
from normforge.kernels.group_tiles import channel_tile
from normforge.selection import dispatch
from proving.cases import EPS, LAYOUTS, Case, cases, doubled, formula, operands

from ..calling import each_device, each_of, refusals, slices
from .groups import close, group, hold, innermost, tiled
from .models import ResidualGroups, noted

SLICES = slices(Path(__file__).with_name("groups.yaml"))
each_layout = pytest.mark.parametrize("channels_last", [False, True])


@pytest.mark.parametrize("problem", SLICES["results"], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_results(problem: Case, layout: str, activation: str) -> None:
    case = problem.but(layout=layout, activation=activation)
    given = operands(case)
    found = hold(case, given)
    assert found["y"].stride() == found["x"].stride() == given["x"].stride()
    assert found["y"].dtype is case["dtype"]


@pytest.mark.parametrize("case", SLICES["channels"], ids=str)
def test_results_of_channels(case: Case) -> None:
    """Also of a call that is known; memory with gaps is copied."""
    for seed in range(2):
        y = hold(case, operands(case, seed=seed))["y"]
        assert (y.movedim(1, -1) if case["layout"] == "channels last" else y).is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("case", SLICES["on a card"], ids=str)
def test_results_of_images(case: Case) -> None:
    # Sums of a million terms.
    hold(case, device="cuda", sum_tolerance=1e-3)


@pytest.mark.gpu
def test_more_than_an_i32_counts() -> None:
    """Elements of a tensor, 4.5 GiB."""
    x = torch.randn(9, 256, 1024, 1024, device="cuda", dtype=torch.bfloat16)
    y = normforge.group_norm(x, 32)
    torch.testing.assert_close(y[-1:], functional.group_norm(x[-1:], 32), rtol=1.6e-2, atol=1.6e-2)


def both(shape: tuple[int, ...], **at: Any) -> list[Case]:
    """Return the cases of LayerNorm, RMSNorm and the clamped L2 norm of channels, whose kernels differ."""
    return [case for case in cases("channels", vary=("norm",), shape=shape, **at) if case["norm"] != "l2"]


TILES = {
    "in registers": Tile(Pipeline.ONE_PASS, 1, 16, 1),
    "in registers, several blocks": Tile(Pipeline.ONE_PASS, 1, 64, 4),
    "parts of a run": Tile(Pipeline.TWO_PASS, 1, 16, 1, held=2),
    "parts of several": Tile(Pipeline.TWO_PASS, 2, 16, 1, held=2),
    "a part that is the group": Tile(Pipeline.TWO_PASS, 16, 16, 1, held=4),
    "parts of half a run": Tile(Pipeline.TWO_PASS, 1, 8, 1, held=2),
}


def normalised(x: torch.Tensor, channels_last: bool, tile: Tile | None, eps: float = 1e-5) -> torch.Tensor:
    """Return a GroupNorm of two groups by a tile; None is that of the table."""
    mode = GroupMode(DType.FP32, Direction.FORWARD, Activation.NONE, channels_last)
    with nullcontext() if tile is None else tiled(mode, x[0].numel() // 2, tile):
        return normforge.group_norm(innermost(x) if channels_last else x, 2, eps=eps)


@pytest.mark.parametrize("tile", TILES)
@each_layout
@pytest.mark.parametrize("direction", list(Direction))
def test_tiles(tile: str, channels_last: bool, direction: Direction) -> None:
    """However groups are cut, whole or in parts, with tiles that reach beyond their channels and positions, or runs.

    Of three channels the second run's second tile may be of a fourth, which is the next group's first, and positions
    may fill tiles that channels do not.
    """
    mode = GroupMode(DType.FP32, direction, Activation.SILU, channels_last)
    for shape in ((1, 12, 3, 9), (1, 20, 4, 4), (1, 6, 8), (1, 6, 4)):
        with tiled(mode, math.prod(shape) // 2, TILES[tile]):
            hold(group(shape, 2, channels_last=channels_last, activation="silu"))


# Six channels of four positions fill tiles of 16 by their positions, and not by their channels.
@pytest.mark.parametrize(
    ("case", "tile"), [*product([group((1, 12, 2, 2), 2)], TILES.values()), *product(both((2, 20, 9)), [None])], ids=str
)
def test_memory_around_x_is_never_read_nor_written(case: Case, tile: Tile | None) -> None:
    given = operands(case)
    around = torch.full((3, given["x"].numel()), math.nan)
    around[1] = given["x"].detach().flatten()
    given["x"] = around[1].view(case["shape"]).requires_grad_()
    mode = GroupMode(DType.FP32, Direction.FORWARD, Activation.NONE, False)
    with nullcontext() if tile is None else tiled(mode, 24, tile):
        hold(case, given)
    assert around[::2].isnan().all()


def test_saved_tensors_may_come_back_at_any_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for aligned addresses read several statistics at once, which a GPU refuses at other addresses."""
    from normforge.families.group import row

    planned = noted(monkeypatch, row, "slots_of")
    case = group((2, 12, 3, 4), 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, LAYOUTS["offset"]):
        hold(case)
    assert planned[-1][1] == {"x_ptr", "weight_ptr", "mean_ptr", "rstd_ptr"}


def test_parts_of_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts in several rounds, merged a few at a time, of groups that are launched a few at a time."""
    from normforge.kernels import assembly

    monkeypatch.setattr(assembly, "_MOST_ITEMS", 1)
    monkeypatch.setattr(assembly, "_MERGED", 2)
    for channels_last, direction in product((False, True), Direction):
        mode = GroupMode(DType.FP32, direction, Activation.NONE, channels_last)
        with tiled(mode, 6 * 27, Tile(Pipeline.TWO_PASS, 2, 16, 1, held=2)):
            hold(group((1, 12, 3, 9), 2, channels_last=channels_last))


@each_device
@each_layout
@pytest.mark.parametrize(
    "tile",
    [
        None,
        Tile(Pipeline.ONE_PASS, 1, 64, 8),
        Tile(Pipeline.TWO_PASS, 1, 64, 8, held=2),
        Tile(Pipeline.TWO_PASS, 16, 64, 8, held=2),
    ],
)
def test_a_large_mean_beside_a_small_deviation(tile: Tile | None, channels_last: bool, device: str) -> None:
    """1e4 with deviations of 1e-2, of which E[x**2] - E[x]**2 leaves nothing; on a card of large images, too."""
    size = (96, 96) if device == "cuda" and tile is None else (12, 11)
    x = torch.randn(1, 8, *size, device=device) * 1e-2 + 1e4
    y = normalised(x, channels_last, tile, 1e-12)
    torch.testing.assert_close(y.double(), functional.group_norm(x.double(), 2, eps=1e-12), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("tile", TILES)
@each_layout
@pytest.mark.parametrize("value", [1e20, 1e30])
def test_groups_whose_squares_overflow_are_zeros(value: float, channels_last: bool, tile: str) -> None:
    """As rows of LayerNorm are, docs/reference/numerics.md says: rstd is 0, and nothing is NaN."""
    length = 4 * 3 * 9
    signs = (-1.0) ** torch.arange(length)
    x = torch.stack([value * signs, torch.linspace(0.0, value, length)]).view(1, 8, 3, 9)
    assert torch.equal(normalised(x, channels_last, TILES[tile]), torch.zeros_like(x))


@each_layout
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


@pytest.mark.parametrize(
    ("case", "values", "hit"),
    [
        *(
            (
                group((2, 8, 3, 3), 4, channels_last=channels_last),
                {(0, 2, 1, 1): math.nan, (1, 7, 0, 0): math.inf},
                [(0, slice(2, 4)), (1, slice(6, 8))],
            )
            for channels_last in (False, True)
        ),
        (both((2, 20, 30))[0], {(0, 3, 7): math.inf, (1, 3, 9): math.nan}, [(0, ..., 7), (1, ..., 9)]),
    ],
    ids=["groups", "groups, channels last", "positions"],
)
def test_what_is_not_finite_stays_in_its_group_or_position(
    case: Case, values: dict[Any, float], hit: list[Any]
) -> None:
    given = {name: tensor.detach() for name, tensor in operands(case).items()}
    (clean,) = case.run(given)
    for at, value in values.items():
        given["x"][at] = value
    (y,) = case.run(given)
    for at in hit:
        assert y[at].isnan().all()
        y[at] = clean[at]
    assert torch.equal(y, clean)


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
    assert [each.path for each in normforge.patch(model).swapped] == ["first.0", "norm", "first"]
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


def test_positions_far_from_zero_keep_their_precision() -> None:
    """An fp32 mean of 1e4 is off by 5e-4, much beside a spread of 1."""
    for channels in (40, 2060):
        case = both((1, channels, 20))[0]
        given = operands(case)
        given["x"] = given["x"] + 1e4
        with torch.no_grad():
            close(case.run(given)[0], formula(case, doubled(given))[0], 2e-5)


def test_operators_refuse_other_numbers_of_groups_and_other_layouts() -> None:
    call: Any = torch.ops.normforge.group_norm
    x, *vectors = operands(both((2, 20, 6, 7))[0]).values()
    for changed, groups, says in ((x, -4, "num_groups is -4"), (innermost(x), 0, "a contiguous x")):
        with pytest.raises(NormforgeError, match=says):
            call(changed, *vectors, groups, EPS, "none", None, False)


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_nothing_is_copied_of_channels(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither layout of x is, nor a gradient in x's layout; kernels read the very memory."""
    from normforge.calls import launch

    launches = noted(monkeypatch, launch, "run_sized")
    case = both((2, 20, 6, 7), layout=layout)[0]
    given = operands(case)
    dy = torch.ones_like(given["x"])
    found = hold(case, given, dy)
    read = {each for (_, _, addresses, *_), _ in launches for each in addresses}
    assert {given["x"].data_ptr(), dy.data_ptr()} <= read
    assert found["x"].stride() == given["x"].stride()


@pytest.mark.parametrize("channels", [40, 1030])
def test_several_tiles_of_channels_a_program(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over positions are those of all tiles that a program takes."""
    monkeypatch.setattr(pipelines.Row, "programs", lambda *_: 2)
    with dispatch.using(dispatch.loaded()):
        hold(both((3, channels, 70))[0])


def test_an_invariant_kernel_is_that_of_any_image() -> None:
    def compilations(space: str) -> list[Any]:
        shapes, modes = [f"2x24x{space}/1"], ["cln_fwd_bf16", "cln_bwd_bf16"]
        return [each.key for each in normforge.compile_keys(modes=modes, shapes=shapes, arch="sm_90")]

    assert compilations("7x7") != compilations("56x56")
    with normforge.batch_invariant():
        assert compilations("7x7") == compilations("56x56")


@pytest.mark.parametrize("channels", [24, 1030, 2049])
def test_batch_invariance_of_channels(channels: int) -> None:
    """A position's bits depend on neither its place, the number of samples nor the size of the image."""
    for case in both((3, channels, 33)):
        given = operands(case)
        part = {**given, "x": given["x"].detach()[1:2, :, 5:21].clone().requires_grad_()}
        with normforge.batch_invariant():
            (whole, dx), (alone, dx_alone) = (
                (y := case.run(each)[0], torch.autograd.grad(y.sum(), each["x"])[0]) for each in (given, part)
            )
        assert torch.equal(whole[1:2, :, 5:21], alone)
        assert torch.equal(dx[1:2, :, 5:21], dx_alone)


@each_of(refusals(Path(__file__).with_name("channels.yaml"), {}))
def test_what_is_refused_of_channels(given: dict[str, Any], error: type[Exception], message: str) -> None:
    usual: dict[str, Any] = {"x": torch.ones(2, 12, 5), "normalized_shape": (12,), "weight": torch.ones(12), "dim": 1}
    # A known call is refused alike.
    for _ in range(2):
        normforge.layer_norm(**usual)
        with pytest.raises(error, match=message):
            normforge.layer_norm(**{**usual, **given})


@pytest.mark.parametrize("channels", [1, 3, 17, 96, 100, 768, 1000, 1024, 1025, 2048, 2049, 30000])
def test_tiles_of_channels_fit_and_have_every_channel(channels: int) -> None:
    for direction, tensors in ((Direction.FORWARD, 1), (Direction.BACKWARD, 2)):
        for dtype in (DType.BF16, DType.FP32):
            tile = channel_tile(GroupMode(dtype, direction, span=Span.CHANNELS), channels)
            chunks = -(-channels // tile.block)
            held = tile.pipeline is Pipeline.ONE_PASS
            values = tile.rows * tile.block * (chunks if held else 1) // (32 * tile.warps)
            # Registers hold 16-bit values in pairs where they are loaded so. Of channels that are read twice they hold
            # fp32 sums, of which a thread adds few from first to last.
            assert values * dtype.itemsize * tensors <= (256 if held or tensors == 2 else 32)
            assert tile.rows * dtype.itemsize >= 32
            assert not held or chunks <= max(8, channels // 16 + 1)
