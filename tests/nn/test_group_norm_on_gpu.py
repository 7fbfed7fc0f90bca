"""GroupNorm on a card: shapes of UNets and VAEs for diffusion, every pipeline, both layouts and directions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import normforge
from proving.cases import operands

from ..calling import captured
from .groups import group, hold, innermost

pytestmark = pytest.mark.gpu

SHAPES = {
    "unet 64": (2, 320, 64, 64),
    "unet 32, trained": (16, 640, 32, 32),
    "unet 16": (2, 1280, 16, 16),
    "unet 16, trained": (16, 1920, 16, 16),
    "unet 8": (2, 1280, 8, 8),
    "unet 8, trained": (32, 1280, 8, 8),
    # 190 channels a group, which fill no tile of several.
    "wide 8": (1, 6080, 8, 8),
    "unet, odd": (2, 960, 33, 31),
    "vae 64": (1, 512, 64, 64),
    "vae 256": (1, 256, 256, 256),
    "video": (1, 128, 5, 64, 64),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_results(shape: str, dtype: torch.dtype, channels_last: bool, activation: str) -> None:
    case = group(SHAPES[shape], 32, dtype=dtype, channels_last=channels_last, activation=activation)
    # Sums of a million terms.
    hold(case, device="cuda", sum_tolerance=1e-3)


@pytest.mark.parametrize("channels_last", [False, True])
def test_two_runs_give_the_same_bits(channels_last: bool) -> None:
    case = group((2, 256, 96, 96), 32, dtype=torch.bfloat16, channels_last=channels_last, activation="silu")
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(hold(case, device="cuda"))
    for name, tensor in runs[0].items():
        assert torch.equal(tensor, runs[1][name]), name


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_large_mean_beside_a_small_deviation(channels_last: bool) -> None:
    x = torch.randn(2, 64, 96, 96, device="cuda") * 1e-2 + 1e4
    x = innermost(x) if channels_last else x
    y = normforge.group_norm(x, 32, eps=1e-12)
    torch.testing.assert_close(y.double(), functional.group_norm(x.double(), 32, eps=1e-12), rtol=1e-3, atol=1e-4)


def test_autocast_is_torchs() -> None:
    x = torch.randn(2, 8, 6, 6, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        y, want = normforge.group_norm(x, 2), functional.group_norm(x, 2)
    assert y.dtype is want.dtype
    torch.testing.assert_close(y, want)


def test_a_cuda_graph() -> None:
    x = torch.randn(2, 320, 32, 32, device="cuda", dtype=torch.bfloat16)
    normforge.group_norm(x, 32)
    graph, y = captured(lambda: normforge.group_norm(x, 32))
    x.copy_(torch.randn_like(x) + 1)
    graph.replay()
    torch.testing.assert_close(y, functional.group_norm(x, 32), rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize("channels_last", [False, True])
def test_torch_compile(channels_last: bool) -> None:
    case = group((2, 64, 17, 16), 32, dtype=torch.bfloat16, channels_last=channels_last)
    x = operands(case, "cuda")["x"]
    module = normforge.GroupNorm(32, 64, activation="silu", device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(module, fullgraph=True)
    y, want = compiled(x), functional.silu(functional.group_norm(x.float(), 32))
    assert y.stride() == x.stride()
    torch.testing.assert_close(y.float(), want, rtol=1.6e-2, atol=1.6e-2)
    torch.autograd.grad(y.sum(), (x, *module.parameters()))


def test_more_than_an_i32_counts() -> None:
    """Elements of a tensor, 4.5 GiB."""
    x = torch.randn(9, 256, 1024, 1024, device="cuda", dtype=torch.bfloat16)
    y = normforge.group_norm(x, 32)
    torch.testing.assert_close(y[-1:], functional.group_norm(x[-1:], 32), rtol=1.6e-2, atol=1.6e-2)
