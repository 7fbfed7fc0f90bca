"""Norms over the channels of (B, C, ...): `layer_norm` and `rms_norm` with dim=1, in both layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge.codegen.groups import GroupMode, Span
from normforge.codegen.values import Direction, DType, Pipeline
from normforge.errors import NormforgeError
from normforge.kernels import pipelines
from normforge.kernels.group_tiles import channel_tile
from normforge.selection import dispatch
from proving.cases import EPS, Case, Tensors, cases, doubled, formula, operands

from ..calling import each_of, refusals, slices
from .groups import close, hold, innermost
from .models import noted


def both(shape: tuple[int, ...], **at: Any) -> list[Case]:
    """Return the cases of LayerNorm, RMSNorm and the clamped L2 norm, whose kernels differ."""
    return [case for case in cases("channels", vary=("norm",), shape=shape, **at) if case["norm"] != "l2"]


def agree(case: Case, given: Tensors, sum_tolerance: float = 0.0) -> None:
    """Fail unless y is that of the formula; no gradient is asked for."""
    with torch.no_grad():
        close(case.run(given)[0], formula(case, doubled(given))[0], sum_tolerance)


SMALL = (2, 20, 6, 7)


@pytest.mark.parametrize("case", slices(Path(__file__).with_name("groups.yaml"))["channels"], ids=str)
def test_results(case: Case) -> None:
    """Also of a call that is known; memory with gaps is copied."""
    for seed in range(2):
        y = hold(case, operands(case, seed=seed))["y"]
        assert (y.movedim(1, -1) if case["layout"] == "channels last" else y).is_contiguous()


def test_positions_far_from_zero_keep_their_precision() -> None:
    """An fp32 mean of 1e4 is off by 5e-4, much beside a spread of 1."""
    for channels in (40, 2060):
        case = both((1, channels, 20))[0]
        given = operands(case)
        agree(case, {**given, "x": given["x"] + 1e4}, 2e-5)


def test_operators_refuse_other_numbers_of_groups_and_other_layouts() -> None:
    call: Any = torch.ops.normforge.group_norm
    x, *vectors = operands(both(SMALL)[0]).values()
    for changed, groups, says in ((x, -4, "num_groups is -4"), (innermost(x), 0, "a contiguous x")):
        with pytest.raises(NormforgeError, match=says):
            call(changed, *vectors, groups, EPS, "none", None, False)


@pytest.mark.parametrize("case", both((2, 20, 9)), ids=str)
def test_memory_around_x_is_never_read_nor_written(case: Case) -> None:
    around = torch.full((3, 2 * 20 * 9), torch.nan)
    given = operands(case)
    around[1] = given["x"].detach().flatten()
    agree(case, {**given, "x": around[1].view(case["shape"])})
    assert around[::2].isnan().all()


@pytest.mark.parametrize("at", [0, 1])
def test_what_is_not_finite_stays_at_its_position(at: int) -> None:
    case = both((2, 20, 30))[0]
    given = {name: tensor.detach() for name, tensor in operands(case).items()}
    (clean,) = case.run(given)
    given["x"][at, 3, 7] = torch.inf
    (y,) = case.run(given)
    assert y[at, :, 7].isnan().all()
    y[at, :, 7] = clean[at, :, 7]
    assert torch.equal(y, clean)


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_nothing_is_copied(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither layout of x is, nor a gradient in x's layout; kernels read the very memory."""
    from normforge.calls import launch

    launches = noted(monkeypatch, launch, "run_sized")
    case = both(SMALL, layout=layout)[0]
    given = operands(case)
    dy = torch.ones_like(given["x"])
    found = hold(case, given, dy)
    read = {each for (_, _, addresses, *_), _ in launches for each in addresses}
    assert {given["x"].data_ptr(), dy.data_ptr()} <= read
    assert found["x"].stride() == given["x"].stride()


@pytest.mark.parametrize("channels", [40, 1030])
def test_several_tiles_a_program(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_batch_invariance(channels: int) -> None:
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
def test_what_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    usual: dict[str, Any] = {"x": torch.ones(2, 12, 5), "normalized_shape": (12,), "weight": torch.ones(12), "dim": 1}
    # A known call is refused alike.
    for _ in range(2):
        normforge.layer_norm(**usual)
        with pytest.raises(error, match=message):
            normforge.layer_norm(**{**usual, **given})


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
