"""Norms over the channels of (B, C, ...): `layer_norm` and `rms_norm` with dim=1, in both layouts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

import normforge
from normforge.codegen.groups import GroupMode, Span
from normforge.codegen.values import Direction, DType, Pipeline
from normforge.errors import ConflictError, DTypeError, NormforgeError, ShapeError
from normforge.kernels import pipelines
from normforge.kernels.group_tiles import channel_tile
from normforge.selection import dispatch
from proving.cases import LAYOUTS

from .groups import close

NORMS = ("layer", "rms")
each_norm = pytest.mark.parametrize("norm", NORMS)
EPS = 1e-5


def over_channels(norm: str, x: torch.Tensor, *vectors: torch.Tensor | None, **named: Any) -> Any:
    """Call normforge's function with dim=1."""
    function: Any = normforge.layer_norm if norm == "layer" else normforge.rms_norm
    return function(x, x.shape[1:2], *vectors[: 1 + (norm == "layer")], eps=EPS, dim=1, **named)


def by_torch(norm: str, x: torch.Tensor, *vectors: torch.Tensor | None) -> Any:
    """Compute the same by torch's function on permuted rows."""
    function: Any = functional.layer_norm if norm == "layer" else functional.rms_norm
    rows = x.movedim(1, -1)
    return function(rows, rows.shape[-1:], *vectors[: 1 + (norm == "layer")], eps=EPS).movedim(-1, 1)


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, far: float = 1.0) -> list[torch.Tensor]:
    """Return x, whose mean is far from zero, weight and bias."""
    torch.manual_seed(0)
    sizes = (shape, shape[1:2], shape[1:2])
    return [(far * at + torch.randn(size)).to(dtype) for at, size in zip((1, 0, 0), sizes, strict=True)]


def hold(norm: str, given: list[torch.Tensor]) -> Any:
    """Fail unless y and all gradients are those in fp64, also when the call is known; return y."""
    own = [each.detach().requires_grad_() for each in given]
    doubles = [each.detach().double().requires_grad_() for each in given]
    dy = torch.randn(given[0].shape).to(given[0].dtype)
    wanted = by_torch(norm, *doubles)
    wanted.backward(dy.double())
    for _ in range(2):
        y = over_channels(norm, *own)
        y.backward(dy)
        close(y, wanted)
        for name, found, exact in zip(("x", "weight", "bias"), own, doubles, strict=True):
            if name != "bias" or norm == "layer":
                assert found.grad is not None
                assert exact.grad is not None
                close(found.grad, exact.grad, 2e-5)
            found.grad = None
    return y


SHAPES = {
    "an image": (2, 24, 5, 7),
    "positions of a power of two": (3, 96, 8, 8),
    "a sequence": (3, 17, 70),
    "a volume": (1, 40, 2, 3, 4),
    "two channels": (2, 2, 3, 5),
    "one position": (3, 12, 1, 1),
    "channels read twice backward": (1, 1030, 9),
    "channels read twice": (1, 2049, 3),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@each_norm
def test_results(norm: str, layout: str, shape: tuple[int, ...]) -> None:
    x, *vectors = drawn(shape)
    x = LAYOUTS["channels last"](x) if layout == "channels last" else x
    y = hold(norm, [x, *vectors])
    assert (y if layout == "contiguous" else y.movedim(1, -1)).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_norm
def test_results_of_16_bits(norm: str, dtype: torch.dtype) -> None:
    assert hold(norm, drawn((2, 20, 6, 7), dtype)).dtype is dtype


def test_positions_far_from_zero_keep_their_precision() -> None:
    """An fp32 mean of 1e4 is off by 5e-4, much beside a spread of 1."""
    for channels in (40, 2060):
        x, *vectors = drawn((1, channels, 20), far=1e4)
        close(over_channels("layer", x, *vectors), by_torch("layer", *[each.double() for each in (x, *vectors)]), 2e-5)


@pytest.mark.parametrize("due", [(True, False), (False, True)])
@each_norm
def test_gradients_that_are_not_due_and_operands_that_are_not_there(norm: str, due: tuple[bool, bool]) -> None:
    x, weight, _ = drawn((2, 20, 30), torch.bfloat16)
    close(over_channels(norm, x), by_torch(norm, x.double()))
    own = [each.requires_grad_(is_due) for each, is_due in zip((x, weight.float()), due, strict=True)]
    double = [each.detach().double().requires_grad_(each.requires_grad) for each in own]
    over_channels(norm, *own).sum().backward()
    by_torch(norm, *double).sum().backward()
    for each, exact in zip(own, double, strict=True):
        assert (each.grad is None) == (exact.grad is None)
        if each.grad is not None and exact.grad is not None:
            close(each.grad, exact.grad, 2e-2)


def test_operators_refuse_other_numbers_of_groups_and_other_layouts() -> None:
    call: Any = torch.ops.normforge.group_norm
    x, *vectors = drawn((2, 12, 5, 7))
    for changed, groups, says in ((x, -2, "num_groups is -2"), (LAYOUTS["channels last"](x), 0, "a contiguous x")):
        with pytest.raises(NormforgeError, match=says):
            call(changed, *vectors, groups, EPS, "none", None, False)


@each_norm
def test_memory_around_x_is_never_read_nor_written(norm: str) -> None:
    around = torch.full((3, 2 * 20 * 9), torch.nan)
    x, *vectors = drawn((2, 20, 9))
    around[1] = x.flatten()
    found = over_channels(norm, around[1].view(x.shape), *vectors)
    close(found, by_torch(norm, *[each.double() for each in (x, *vectors)]))
    assert around[::2].isnan().all()


@pytest.mark.parametrize("at", [0, 1])
def test_what_is_not_finite_stays_at_its_position(at: int) -> None:
    x, *vectors = drawn((2, 20, 30))
    clean = over_channels("layer", x, *vectors)
    x[at, 3, 7] = torch.inf
    y = over_channels("layer", x, *vectors)
    assert y[at, :, 7].isnan().all()
    y[at, :, 7] = clean[at, :, 7]
    assert torch.equal(y, clean)


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither layout of x is, nor a gradient in x's layout; kernels read the very memory."""
    from normforge.calls import launch

    read: set[int] = set()
    run_sized = launch.run_sized

    def seen(plan: Any, sized: Any, addresses: Any, *others: Any, **named: Any) -> Any:
        read.update(addresses)
        return run_sized(plan, sized, addresses, *others, **named)

    monkeypatch.setattr(launch, "run_sized", seen)
    for layout in (torch.contiguous_format, torch.channels_last):
        x, weight, bias = drawn((2, 24, 6, 5))
        x = x.to(memory_format=layout).requires_grad_()
        y = over_channels("layer", x, weight, bias)
        dy = torch.ones_like(y)
        y.backward(dy)
        assert {x.data_ptr(), dy.data_ptr()} <= read
        assert x.grad is not None
        assert x.grad.is_contiguous(memory_format=layout)


@each_norm
def test_another_layout_is_copied_once_and_another_gradient_too(norm: str) -> None:
    x, *vectors = drawn((2, 20, 6, 10))
    hold(norm, [x[..., ::2], *vectors])
    own = x.detach().requires_grad_()
    y = over_channels(norm, own, *vectors)
    dy = torch.randn(2, 6, 10, 20).movedim(-1, 1)
    double = x.double().requires_grad_()
    by_torch(norm, double, *[each.double() for each in vectors]).backward(dy.double())
    y.backward(dy)
    assert own.grad is not None
    assert double.grad is not None
    close(own.grad, double.grad, 2e-5)


@each_norm
def test_second_derivatives(norm: str) -> None:
    x, *vectors = drawn((2, 12, 5))
    found = []
    for run in (over_channels, by_torch):
        own, double = [each.clone().requires_grad_() for each in (x, vectors[0])], vectors[1]
        (grad,) = torch.autograd.grad(run(norm, *own, double).sin().sum(), own[0], create_graph=True)
        found.append(torch.autograd.grad(grad.sin().sum(), own))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@each_norm
def test_transforms_and_double_precision_take_torchs_operator(norm: str) -> None:
    x, *vectors = drawn((2, 12, 5))
    several = torch.stack([x, 2 * x])
    mapped = torch.func.vmap(lambda x: over_channels(norm, x, *vectors))(several)
    torch.testing.assert_close(mapped[1], by_torch(norm, several[1], *vectors))
    assert torch.equal(over_channels(norm, x.double()), by_torch(norm, x.double()))


@each_norm
def test_compiled(norm: str) -> None:
    x, *vectors = drawn((2, 12, 5, 7))
    own = x.requires_grad_()
    compiled: Any = torch.compile(partial(over_channels, norm), backend="aot_eager", fullgraph=True, dynamic=False)
    y = compiled(own, *vectors)
    assert torch.equal(y, over_channels(norm, own, *vectors))
    (found,) = torch.autograd.grad(y.sin().sum(), own)
    (wanted,) = torch.autograd.grad(over_channels(norm, own, *vectors).sin().sum(), own)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("channels", [40, 1030])
def test_several_tiles_a_program(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over positions are those of all tiles that a program takes."""
    monkeypatch.setattr(pipelines.Row, "programs", lambda *_: 2)
    x, *vectors = drawn((3, channels, 70))
    with dispatch.using(dispatch.loaded()):
        hold("layer", [x, *vectors])


def test_an_invariant_kernel_is_that_of_any_image() -> None:
    def compilations(space: str) -> list[Any]:
        shapes, modes = [f"2x24x{space}/1"], ["cln_fwd_bf16", "cln_bwd_bf16"]
        return [each.key for each in normforge.compile_keys(modes=modes, shapes=shapes, arch="sm_90")]

    assert compilations("7x7") != compilations("56x56")
    with normforge.batch_invariant():
        assert compilations("7x7") == compilations("56x56")


@pytest.mark.parametrize("channels", [24, 1030, 2049])
def test_batch_invariance(channels: int) -> None:
    """A position's bits depend on neither its place, the number of samples nor the size of the image."""
    x, *vectors = drawn((3, channels, 33))
    with normforge.batch_invariant():
        for norm in NORMS:
            own = x.clone().requires_grad_()
            y = over_channels(norm, own, *vectors)
            y.backward(torch.ones_like(y))
            part = x[1:2, :, 5:21].clone().requires_grad_()
            of_part = over_channels(norm, part, *vectors)
            of_part.backward(torch.ones_like(of_part))
            assert own.grad is not None
            assert part.grad is not None
            assert torch.equal(y[1:2, :, 5:21], of_part)
            assert torch.equal(own.grad[1:2, :, 5:21], part.grad)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another dim": ({"dim": 2}, ConflictError, "dim is 2; it takes -1"),
    "no whole number": ({"dim": 1.0}, ConflictError, "dim is 1.0"),
    "cast": ({"cast": "before_weight"}, ConflictError, "x_bias, weight_offset and cast go with dim=-1"),
    "weight_offset": ({"weight_offset": 1.0}, ConflictError, "go with dim=-1"),
    "x_bias": ({"x_bias": torch.ones(12)}, ConflictError, "go with dim=-1"),
    "another size": ({"normalized_shape": (5,)}, ShapeError, "normalized_shape is"),
    "a size alone": ({"normalized_shape": 12}, DTypeError, "normalized_shape is 12"),
    "another weight": ({"weight": torch.ones(5)}, ShapeError, "weight has shape"),
    "eps": ({"eps": -1.0}, ConflictError, "eps=-1.0 will not do"),
    "one dimension": ({"x": torch.ones(12)}, ShapeError, "at least 2 dimensions"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(case: tuple[dict[str, Any], type[Exception], str]) -> None:
    changed, error, says = case
    usual: dict[str, Any] = {"x": torch.ones(2, 12, 5), "normalized_shape": (12,), "weight": torch.ones(12), "dim": 1}
    # A known call is refused alike.
    for _ in range(2):
        normforge.layer_norm(**usual)
        with pytest.raises(error, match=says):
            normforge.layer_norm(**{**usual, **changed})


@pytest.mark.parametrize("channels", [1, 3, 17, 96, 100, 768, 1000, 1024, 1025, 2048, 2049, 30000])
def test_tiles_fit_and_have_every_channel(channels: int) -> None:
    for direction in Direction:
        for dtype in (DType.BF16, DType.FP32):
            tile = channel_tile(GroupMode(dtype, direction, span=Span.CHANNELS), channels)
            chunks = -(-channels // tile.block)
            held = tile.pipeline is Pipeline.ONE_PASS
            values = tile.rows * tile.block * (chunks if held else 1) // (32 * tile.warps)
            # Registers hold 16-bit values in pairs where they are loaded so.
            assert values * dtype.itemsize * (1 + (direction is Direction.BACKWARD)) <= 256
            assert tile.rows * dtype.itemsize >= 32
            assert not held or chunks <= max(8, channels // 16 + 1)
