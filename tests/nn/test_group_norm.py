"""GroupNorm's functional form and module: what torch computes, in both layouts, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import normforge
from normforge import errors
from normforge.codegen.groups import Activation, GroupMode
from normforge.codegen.instance import Tile
from normforge.codegen.values import Direction, DType, Pipeline

from ..thorough import THOROUGH
from .groups import Problem, double, expected, innermost, require, results, tiled
from .models import norm

PROBLEMS = {
    "positions of a power of two": Problem((2, 8, 4, 4), 4),
    "odd positions": Problem((2, 6, 5, 7), 3),
    "one position": Problem((3, 12), 4),
    "a sequence": Problem((2, 20, 3), 10),
    "a volume": Problem((1, 8, 3, 4, 5), 2),
    "one group": Problem((2, 6, 9), 1),
    "a channel a group": Problem((2, 6, 8, 8), 6),
    "one element a group": Problem((2, 4, 1, 1), 4),
    "tiles of several blocks of channels": Problem((1, 40, 8, 8), 2),
    "several programs a group": Problem((2, 16, 17, 24), 1),
    "wide groups of one position": Problem((2, 5000), 1),
    "bf16": Problem((2, 12, 7, 5), 3, torch.bfloat16),
    "fp16": Problem((2, 12, 7, 5), 3, torch.float16),
    "no weight and no bias": Problem((2, 6, 5), 2, affine=False),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_results(problem: Problem, channels_last: bool, activation: str | None) -> None:
    problem = replace(problem, channels_last=channels_last, activation=activation)
    found, wanted = results(problem)
    require(found, wanted, problem.dtype)
    assert found["y"].stride() == found["dx"].stride() == problem.x().stride()
    assert {found[name].dtype for name in ("y", "dx")} == {problem.dtype}
    assert {found[name].dtype for name in found if name not in ("y", "dx")} <= {torch.float32}


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
            found, wanted = results(Problem(shape, 2, channels_last=channels_last, activation="silu"))
        require(found, wanted, torch.float32)


def test_parts_of_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a part has that registers do not hold at once, and groups that are launched a few at a time."""
    from normforge.kernels import assembly, group_tiles

    monkeypatch.setattr(group_tiles, "_MOST_PARTS", 2)
    monkeypatch.setattr(assembly, "_MOST_ITEMS", 1)
    for channels_last, direction in product((False, True), Direction):
        mode = GroupMode(DType.FP32, direction, Activation.NONE, channels_last)
        with tiled(mode, 6 * 27, Tile(Pipeline.TWO_PASS, 1, 16, 1, held=2)):
            found, wanted = results(Problem((1, 12, 3, 9), 2, channels_last=channels_last))
        require(found, wanted, torch.float32)


@pytest.mark.parametrize("channels_last", [False, True])
def test_programs_that_wait_for_one_another(channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one after another: a second launch finds what the first one's programs published."""
    from normforge.calls import launch
    from normforge.kernels import group_tiles

    exchanges: dict[int, torch.Tensor] = {}
    monkeypatch.setattr(group_tiles, "_fits", lambda *_: True)
    monkeypatch.setattr(
        launch, "new_exchange", lambda _, count: exchanges.setdefault(count, torch.zeros(count, dtype=torch.int64))
    )
    problem = Problem((2, 12, 3, 9), 2, torch.bfloat16, channels_last)
    x, (weight, bias) = problem.x(), problem.vectors()
    mode = GroupMode(DType.BF16, Direction.FORWARD, Activation.SILU, channels_last)
    with tiled(mode, 6 * 27, Tile(Pipeline.SPREAD, 1, 32, 1, held=2)):
        for _ in range(2):
            y = normforge.group_norm(x, 2, weight, bias, activation="silu")
    (exchange,) = exchanges.values()
    assert exchange.numel() > 2 * 2
    want = expected(x.double(), 2, double(weight), double(bias), activation="silu")
    require({"y": y}, {"y": want}, torch.bfloat16)


def test_parts_are_added_in_one_order() -> None:
    problem = Problem((1, 4, 47, 50), 1, torch.bfloat16, activation="silu")
    torch.manual_seed(1)
    first, _ = results(problem)
    torch.manual_seed(1)
    second, _ = results(problem)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


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
    torch.testing.assert_close(y.double(), expected(x.double(), 2, None, None, 1e-12), rtol=1e-3, atol=1e-4)


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
    torch.testing.assert_close(y.double(), expected(x.double(), 2, None, None), rtol=16 * 32 * 2**-25, atol=2e-6)


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


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[:, 2:6],
        lambda x: x[:, :, 1:5, ::2],
        lambda x: x.transpose(2, 3),
        lambda x: x[:1].expand(3, -1, -1, -1),
        lambda x: x.flip(0)[1:],
        lambda x: innermost(x)[:, :4],
        lambda x: torch._neg_view(x),
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    ],
)
def test_other_layouts_work(cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = cut(torch.randn(2, 8, 6, 6))
    leaf = x.detach().requires_grad_()
    y = normforge.group_norm(leaf, 2)
    (dx,) = torch.autograd.grad(y.square().sum() + y.sum(), leaf)
    exact = double(x)
    assert exact is not None
    want = expected(exact, 2, None, None)
    (dwant,) = torch.autograd.grad(want.square().sum() + want.sum(), exact)
    torch.testing.assert_close(y.double(), want, rtol=1.3e-6, atol=1e-5)
    torch.testing.assert_close(dx.double(), dwant, rtol=1e-4, atol=1e-4)


def test_channels_that_are_almost_innermost_stay_so() -> None:
    y = normforge.group_norm(innermost(torch.randn(2, 8, 6, 6))[:, :4], 2)
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("memory_format", "shape"),
    [(torch.channels_last, (2, 4, 3, 5)), (torch.channels_last_3d, (2, 4, 3, 2, 5))],
)
def test_torchs_memory_formats(memory_format: torch.memory_format, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(memory_format=memory_format)
    y = normforge.group_norm(x, 2)
    assert y.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(y, functional.group_norm(x, 2))


@pytest.mark.parametrize("shape", [(0, 8, 4, 4), (2, 8, 0)])
def test_nothing_to_normalise(shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(shape, requires_grad=True), torch.randn(8), torch.randn(8)
    weight.requires_grad_(), bias.requires_grad_()
    y = normforge.group_norm(x, 4, weight, bias)
    assert y.shape == shape
    dx, dweight, dbias = torch.autograd.grad(y.sum(), (x, weight, bias))
    assert dx.shape == shape
    want = torch.autograd.grad(functional.group_norm(x, 4, weight, bias).sum(), (weight, bias))
    torch.testing.assert_close((dweight, dbias), want, equal_nan=True)


def test_instance_norm_is_one_channel_a_group() -> None:
    x, weight, bias = torch.randn(3, 6, 7, 5), torch.randn(6), torch.randn(6)
    torch.testing.assert_close(
        normforge.group_norm(x, 6, weight, bias), functional.instance_norm(x, weight=weight, bias=bias)
    )


def test_a_gradient_that_lies_otherwise() -> None:
    x = innermost(torch.randn(2, 8, 5, 6)).requires_grad_()
    dy = torch.randn(2, 8, 6, 5).transpose(2, 3)
    (dx,) = torch.autograd.grad(normforge.group_norm(x, 2), x, dy)
    (want,) = torch.autograd.grad(functional.group_norm(x, 2), x, dy)
    torch.testing.assert_close(dx, want, rtol=1e-4, atol=1e-5)


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


@THOROUGH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("tile", [Tile(Pipeline.TWO_PASS, 1, 64, 2, held=2), Tile(Pipeline.ONE_PASS, 1, 64, 16)])
def test_every_mode(dtype: torch.dtype, channels_last: bool, activation: str | None, tile: Tile) -> None:
    from normforge.dtypes import DTYPES

    word = Activation.NONE if activation is None else Activation.SILU
    for direction in Direction:
        with tiled(GroupMode(DTYPES[dtype], direction, word, channels_last), 5 * 99, tile):
            found, wanted = results(Problem((2, 10, 9, 11), 2, dtype, channels_last, activation))
        require(found, wanted, dtype)


class Block(torch.nn.Module):
    """As UNets have them: GroupNorm and SiLU in a Sequential, and once more in a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.GroupNorm(2, 8), torch.nn.SiLU(), torch.nn.Conv2d(8, 8, 1))
        self.norm = torch.nn.GroupNorm(4, 8, eps=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X and what two convolutions' worth of norms make of it."""
        y: torch.Tensor = x + functional.silu(self.norm(self.first(x)))
        return y


def test_patch_takes_group_norms_and_the_silu_behind_them() -> None:
    model, x = Block(), torch.randn(2, 8, 4, 4)
    parameters, state = list(model.parameters()), {name: each.clone() for name, each in model.state_dict().items()}
    want = model(x)
    done = normforge.patch(model)
    assert [(each.path, each.new.__name__) for each in done.swapped] == [
        ("first.0", "GroupNorm"),
        ("norm", "GroupNorm"),
        ("first", "GroupNormSequential"),
    ]
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(state)
    assert normforge.patch(model).swapped == ()
    # Each module alone is what it was.
    weight, bias = model.first[0].parameters()
    torch.testing.assert_close(model.first[0](x), functional.group_norm(x, 2, weight, bias))
    normforge.unpatch(model)
    assert {type(each) for each in model.modules()} == {type(each) for each in Block().modules()}
    assert torch.equal(model(x), want)


def activated() -> tuple[torch.nn.Sequential, torch.Tensor]:
    """Return a patched norm with its SiLU, and an input."""
    model = torch.nn.Sequential(torch.nn.GroupNorm(2, 8), torch.nn.SiLU())
    normforge.patch(model)
    return model, torch.randn(2, 8, 5)


def test_hooks_between_a_norm_and_its_silu_run() -> None:
    model, x = activated()
    seen: list[torch.Tensor] = []
    handle = model[0].register_forward_hook(lambda module, args, y: seen.append(y))
    torch.testing.assert_close(model(x), functional.silu(functional.group_norm(x, 2)))
    torch.testing.assert_close(seen, [functional.group_norm(x, 2)])
    handle.remove()
    torch.testing.assert_close(model(x), functional.silu(functional.group_norm(x, 2)))
    assert len(seen) == 1


def test_global_hooks_see_a_norm_and_its_silu() -> None:
    model, x = activated()
    seen: list[tuple[torch.nn.Module, torch.Tensor]] = []
    with torch.nn.modules.module.register_module_forward_hook(lambda module, args, y: seen.append((module, y))):
        y = model(x)
    norm = functional.group_norm(x, 2)
    assert [module for module, _ in seen] == [model[0], model[1], model]
    torch.testing.assert_close([output for _, output in seen], [norm, functional.silu(norm), y])
    model(x)
    assert len(seen) == 3


def test_silu_is_computed_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = activated()
    monkeypatch.setattr(torch.nn.SiLU, "forward", lambda self, x: pytest.fail("SiLU was called"))
    torch.testing.assert_close(model(x), functional.silu(functional.group_norm(x, 2)))


def test_patch_tells_subclasses_apart() -> None:
    """Timm's calls what torch's does; guided diffusion's does more than that."""
    plain = norm(lambda m, x: functional.group_norm(x, m.num_groups, m.weight, m.bias, m.eps), torch.nn.GroupNorm)
    upcast = norm(lambda m, x: torch.nn.GroupNorm.forward(m, x.float()).type(x.dtype), torch.nn.GroupNorm)
    done = normforge.patch(torch.nn.ModuleList([plain(2, 8), upcast(2, 8)]))
    assert [each.old for each in done.swapped] == [plain]
    assert [(each.cls, each.reason) for each in done.skipped] == [
        (upcast, "OwnNorm is a subclass of torch's, and its forward may be its own")
    ]


def test_fuse_false_leaves_silu_alone() -> None:
    model = torch.nn.Sequential(torch.nn.GroupNorm(2, 8), torch.nn.SiLU())
    assert [each.new for each in normforge.patch(model, fuse=False).swapped] == [normforge.GroupNorm]
    assert type(model) is torch.nn.Sequential


def test_known_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like one before but for samples, they are looked up; anything else is checked."""
    from normforge.families.group import row as group

    weight, bias = torch.randn(8), torch.randn(8)

    def call(x: torch.Tensor, groups: int = 2, eps: float = 1e-5) -> torch.Tensor:
        y = normforge.group_norm(x, groups, weight, bias, eps)
        torch.testing.assert_close(y, functional.group_norm(x, groups, weight, bias, eps), rtol=1e-4, atol=1e-5)
        return y

    call(torch.randn(2, 8, 5))
    call(innermost(torch.randn(2, 8, 5)))
    checked: list[object] = []
    prepared = group._prepared

    def noted(*given: Any) -> Any:
        checked.append(given)
        return prepared(*given)

    monkeypatch.setattr(group, "_prepared", noted)
    # The last is copied, and the copy is known.
    for x in (torch.randn(3, 8, 5), torch.randn(7, 8, 5), innermost(torch.randn(2, 8, 5)), torch.randn(4, 8, 5)[::2]):
        call(x)
    assert checked == []
    # Kernels are not compiled for an eps.
    call(torch.randn(2, 8, 5), eps=1e-2)
    # A look-up takes floats alone, and the call is looked up again with one.
    call(torch.randn(2, 8, 5), eps=1)
    assert checked == []
    others = (
        torch.randn(2, 8, 6),
        torch.randn(2, 8, 5, 1),
        torch.randn(81)[1:].view(2, 8, 5),
    )
    for number, x in enumerate(others, start=1):
        for _ in range(2):
            call(x)
            assert len(checked) == number
    call(torch.randn(2, 8, 5), groups=4)
    assert len(checked) == len(others) + 1
    leaf = torch.randn(2, 8, 5, requires_grad=True)
    for _ in range(2):
        torch.autograd.grad(call(leaf).sum(), leaf)
    assert len(checked) == len(others) + 2
    with torch.no_grad():
        assert not call(leaf).requires_grad
    assert normforge.group_norm(torch.randn(0, 8, 5), 2, weight, bias).shape == (0, 8, 5)
    with pytest.raises(errors.ShapeError):
        normforge.group_norm(torch.randn(2, 8, 5), 2, torch.randn(7), bias)
