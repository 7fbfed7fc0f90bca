"""Norms with a forward of their own that `patch` takes: those that call torch's functions, and gated ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

import normforge
from normforge.errors import InvarianceError
from normforge.families.group import row
from normforge.patching.calling import CallingNorm
from normforge.patching.huggingface import HuggingFaceGatedRMSNorm, HuggingFaceLayerNorm

from . import models
from .models import WIDTH, norm, randomised
from .twins import assert_same_results, twins

llama = models.LlamaRMSNorm.forward


class LayerNorm2d(torch.nn.LayerNorm):
    """Normalises channels, which are x's second dimension, as ConvNeXt does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class GroupNorm32(torch.nn.GroupNorm):
    """Computes in fp32, as guided diffusion does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).type(x.dtype)


class ChannelsL2Norm(torch.nn.Module):
    """Divides channels by their L2 norm in fp32 and scales them, as Wan's WanRMS_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.channel_first, self.scale, self.bias = True, WIDTH**0.5, 0.0
        self.gamma = torch.nn.Parameter(torch.ones(WIDTH, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if x.dtype is not torch.float32 else x
        normalized = functional.normalize(wide, dim=(1 if self.channel_first else -1)).to(x.dtype)
        y: torch.Tensor = normalized * self.scale * self.gamma + self.bias
        return y


class MinimalNorm(torch.nn.Module):
    """A LayerNorm with an optional bias, as minimal GPTs have."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))
        self.bias = torch.nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


def offset(m: Any, x: torch.Tensor) -> Any:
    return functional.layer_norm(x, m.normalized_shape, m.weight + 1.0, bias=m.bias, eps=m.eps)


def in_fp16(m: Any, input: torch.Tensor) -> Any:
    x, weight, bias = (each.half() for each in (input, m.weight, m.bias))
    return functional.layer_norm(x, m.normalized_shape, weight, bias, m.eps).to(input.dtype)


def transposed(m: Any, x: torch.Tensor) -> Any:
    return torch.nn.LayerNorm.forward(m, x.transpose(1, 2)).transpose(1, 2)


def centred(m: Any, x: torch.Tensor) -> Any:
    """Compute LayerNorm with a weight alone, as Cohere's models do."""
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    return (m.weight.float() * (h * (h.pow(2).mean(-1, keepdim=True) + m.variance_epsilon).rsqrt())).to(x.dtype)


# Norms, the class of ours that they get, and the shape of an x; norms of 16 bits say so.
TAKEN: dict[str, tuple[Callable[[], torch.nn.Module], type, tuple[int, ...]]] = {
    "channels": (lambda: LayerNorm2d(WIDTH), CallingNorm, (2, WIDTH, 3, 2)),
    "channels and columns": (lambda: LayerNorm2d((2, WIDTH)), CallingNorm, (2, WIDTH, 3, 2)),
    "fp32 by super": (lambda: GroupNorm32(4, WIDTH), CallingNorm, (2, WIDTH, 5)),
    "no bias": (MinimalNorm, CallingNorm, (5, WIDTH)),
    "a bias": (lambda: MinimalNorm(bias=True), CallingNorm, (5, WIDTH)),
    "an offset": (lambda: norm(offset, torch.nn.LayerNorm)(WIDTH), CallingNorm, (2, 3, WIDTH)),
    "fp16": (lambda: norm(in_fp16, torch.nn.LayerNorm)(WIDTH), CallingNorm, (5, WIDTH)),
    "torch's method": (lambda: norm(transposed, torch.nn.LayerNorm)(WIDTH), CallingNorm, (2, WIDTH, 3)),
    "L2 norm of channels": (ChannelsL2Norm, CallingNorm, (2, WIDTH, 3, 5)),
    "centred": (norm(centred, models.LlamaRMSNorm), HuggingFaceLayerNorm, (2, 3, WIDTH)),
    "renamed": (lambda: models.RenamedLayerNorm(WIDTH), normforge.LayerNorm, (9, 2, WIDTH)),
    "renamed, of planes": (lambda: models.RenamedLayerNorm((2, WIDTH)), normforge.LayerNorm, (9, 2, WIDTH)),
    # As FP32LayerNorm of diffusers: kernels compute in fp32, and round once, to the dtype of x.
    "fp32": (lambda: models.WideLayerNorm(WIDTH), normforge.LayerNorm, (9, WIDTH)),
    "fp32, of bf16": (lambda: models.WideLayerNorm(WIDTH).bfloat16(), normforge.LayerNorm, (9, WIDTH)),
}
each_taken = pytest.mark.parametrize("name", TAKEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_taken
def test_results_and_gradients_stay(name: str, dtype: torch.dtype) -> None:
    make, ours, shape = TAKEN[name]
    original, patched = twins(randomised(make()))
    assert isinstance(patched, ours)
    assert isinstance(patched, type(original))
    x = torch.randn(shape).to(dtype)
    is_rounded = dtype is torch.bfloat16 or name.endswith("16")
    assert_same_results(patched, original, x, tolerance=2e-2 if is_rounded else 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert patched(x).dtype == original(x).dtype


@each_taken
def test_kernels_compute_them_and_compiled_code_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, _, shape = TAKEN[name]
    original, patched = twins(randomised(make()))
    x, seen = torch.randn(shape), []
    torch._dynamo.reset()
    for module in (original, patched):
        counter = CompileCounter()
        compiled: Any = torch.compile(module, backend=counter, fullgraph=True)
        torch.testing.assert_close(compiled(x), original(x))
        seen.append(counter.op_count)
    assert seen[0] == seen[1] or not isinstance(patched, CallingNorm)
    # torch's own functions are not called.
    for function in ("layer_norm", "rms_norm", "group_norm"):
        monkeypatch.setattr(torch, function, None)
    monkeypatch.setattr(functional, "normalize", None)
    if isinstance(patched, CallingNorm):
        patched(x)
        with pytest.raises(TypeError, match="not callable"):
            original(x)


def test_permuted_channels_are_normalised_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous images stay so, where torch's forward returns a permuted tensor."""
    given: list[Any] = []
    backward = row.launched_backward

    def seen(*arguments: Any) -> Any:
        given.append(arguments[0])
        return backward(*arguments)

    monkeypatch.setattr(row, "launched_backward", seen)
    for name in ("channels", "torch's method"):
        make, _, shape = TAKEN[name]
        _, patched = twins(randomised(make()))
        x = torch.randn(shape, requires_grad=True)
        y = patched(x)
        y.sum().backward()
        assert y.is_contiguous()
        assert given[-1].x.data_ptr() == x.data_ptr()
    assert len(given) == 2


def test_batch_invariance_is_kept_or_refused() -> None:
    modules = [randomised(make()) for make in (MinimalNorm, models.LlamaRMSNorm, GATED["gated first"])]
    x = torch.randn(9, WIDTH)
    for module, kept, refused in zip(modules, (x, x, None), (x.double(), x.double(), x), strict=True):
        normforge.patch(module)
        with normforge.batch_invariant():
            assert kept is None or torch.equal(module(kept)[:1], module(kept[:1]))
            with pytest.raises(InvarianceError):
                module(refused)


# Gated norms


def gated(m: Any, x: torch.Tensor, gate: torch.Tensor) -> Any:
    """Multiply behind the norm, whose rows are rounded before the weight, as in Qwen3-Next."""
    return (llama(m, x) * ACTIVATIONS[m.activation](gate.float())).to(x.dtype)


def gated_once(m: Any, x: torch.Tensor, gate: Any = None) -> Any:
    """Round once, as Kimi's linear attention does."""
    return (m.weight.float() * m.factor(x) * ACTIVATIONS[m.activation](gate.float())).to(x.dtype)


def gated_first(m: Any, x: torch.Tensor, gate: torch.Tensor | None = None) -> Any:
    """Multiply first, and normalise groups of columns, as in Mamba2."""
    h = x.float() if gate is None else x.float() * functional.silu(gate.float())
    groups = h.view(*h.shape[:-1], -1, m.group_size)
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + m.variance_epsilon)
    return m.weight * groups.flatten(-2).to(x.dtype)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": functional.silu, "sigmoid": torch.sigmoid}
GATED: dict[str, Callable[[], torch.nn.Module]] = {
    "silu": norm(gated, activation="silu"),
    "sigmoid": norm(gated, activation="sigmoid"),
    "rounded once": norm(gated_once, activation="sigmoid"),
    "gated first": norm(gated_first, group_size=WIDTH // 4),
}
each_gated = pytest.mark.parametrize("make", GATED.values(), ids=GATED)


@pytest.mark.parametrize("cast_before_weight", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_gated
def test_gated_norms_keep_their_results(
    make: Callable[[], torch.nn.Module], dtype: torch.dtype, cast_before_weight: bool
) -> None:
    original = randomised(make()).to(dtype)
    patched = copy.deepcopy(original)
    normforge.patch(patched, cast_before_weight=cast_before_weight)
    assert isinstance(patched, HuggingFaceGatedRMSNorm)
    x, gate = (torch.randn(2, 33, WIDTH).to(dtype).requires_grad_() for _ in range(2))
    assert_same_results(patched, original, x, gate, tolerance=1e-5 if dtype is torch.float32 else 2e-2)
    y, wanted = patched(x, gate), original(x, gate)
    if cast_before_weight:
        differing = ~torch.isclose(y.float(), wanted.float(), rtol=1e-5, atol=1e-6)
        assert differing.float().mean() < 1e-3
    assert torch.equal(patched(x=x, gate=gate), y)
    assert torch.equal(copy.deepcopy(patched)(x, gate), y)
    normforge.unpatch(patched)
    assert torch.equal(patched(x, gate), wanted)


READ: dict[str, dict[str, Any]] = {
    "silu": {"variance_epsilon": 0.5, "activation": "sigmoid"},
    "rounded once": {"activation": "silu"},
    "gated first": {"group_size": WIDTH},
}


@pytest.mark.parametrize("name", READ)
def test_a_gated_norm_reads_what_its_forward_reads(name: str) -> None:
    original, patched = twins(randomised(GATED[name]()))
    x, gate = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    compiled: Any = torch.compile(patched, backend=CompileCounter(), fullgraph=True)
    assert torch.equal(compiled(x, gate), original(x, gate))
    for module in (original, patched):
        for attribute, value in READ[name].items():
            setattr(module, attribute, value)
    torch.testing.assert_close(patched(x, gate), original(x, gate))
    # Without its gate the forward that it had runs, if it can.
    if name == "gated first":
        assert torch.equal(patched(x), original(x))
    if name == "silu":
        with pytest.raises(TypeError, match="gate"):
            patched(x)
