"""Backward passes of GroupNorm whose tensors are like those of one before: launched without being looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from normforge.families.group import row as group

from ..calling import each_device
from .looked import Looked

SAMPLES, CHANNELS, SPACE, GROUPS = 3, 12, (3, 4), 4


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    return Looked(monkeypatch, group, "launched_backward")


def operands(
    device: str,
    *,
    samples: int = SAMPLES,
    dtype: torch.dtype = torch.float32,
    of_vectors: torch.dtype = torch.float32,
    last: bool = False,
) -> list[torch.Tensor]:
    """Of a call: x, weight and bias."""
    generator = torch.Generator().manual_seed(samples)
    sizes = (samples, CHANNELS, *SPACE), (CHANNELS,), (CHANNELS,)
    x, weight, bias = (torch.randn(size, generator=generator).to(device) for size in sizes)
    x = x.to(dtype, memory_format=torch.channels_last if last else torch.contiguous_format)
    return [leaf.requires_grad_() for leaf in (x, weight.to(of_vectors), bias.to(of_vectors))]


def gradients(
    leaves: list[torch.Tensor], dy: torch.Tensor | None = None, activation: str = "none"
) -> tuple[torch.Tensor, ...]:
    x, weight, bias = leaves
    y = normforge.group_norm(x, GROUPS, weight, bias, activation=activation)
    arrived = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y) if dy is None else dy
    return torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], arrived)


def exact(
    leaves: list[torch.Tensor], dy: torch.Tensor | None = None, activation: str = "none"
) -> tuple[torch.Tensor, ...]:
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y = torch.nn.functional.group_norm(wide[0], GROUPS, wide[1], wide[2])
    y = torch.nn.functional.silu(y) if activation == "silu" else y
    arrived = torch.linspace(-1, 1, y.numel()).view(y.shape).to(leaves[0]) if dy is None else dy
    return torch.autograd.grad(y, wide, arrived.double())


def agree(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], tolerance: float = 1e-4) -> None:
    for gradient, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), its, rtol=tolerance, atol=tolerance)


@each_device
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_the_second_backward_pass_is_known(activation: str, last: bool, device: str, looked: Looked) -> None:
    leaves = operands(device, last=last)
    dy = torch.randn_like(leaves[0])
    first = gradients(leaves, dy, activation)
    assert looked.counts() == (1, 0)
    second = gradients(leaves, dy, activation)
    assert looked.counts() == (0, 1)
    agree(second, exact(leaves, dy, activation))
    assert all(map(torch.equal, first, second))
    assert [gradient.stride() for gradient in second] == [leaf.stride() for leaf in leaves]


@each_device
def test_other_numbers_of_samples_are_known(device: str, looked: Looked) -> None:
    gradients(operands(device))
    looked.counts()
    for samples in (1, 2, 40):
        leaves = operands(device, samples=samples)
        agree(gradients(leaves), exact(leaves), 1e-3)
        assert looked.counts() == (0, 1), samples


@each_device
def test_no_samples_are_no_kernels(device: str, looked: Looked) -> None:
    gradients(operands(device))
    found = gradients(operands(device, samples=0))
    assert found[0].shape == (0, CHANNELS, *SPACE)
    assert not found[1].any()


@each_device
def test_what_differs_is_looked_at(device: str, looked: Looked) -> None:
    gradients(operands(device))
    different: list[dict[str, Any]] = [{"dtype": torch.bfloat16}, {"of_vectors": torch.bfloat16}, {"last": True}]
    for others in different:
        looked.counts()
        leaves = operands(device, **others)
        dy = torch.randn_like(leaves[0])
        agree(gradients(leaves, dy), exact(leaves, dy), 1e-4 if "last" in others else 2e-2)
        assert looked.counts() == (1, 0), others


@each_device
def test_a_gradient_that_lies_otherwise_is_copied_and_then_known(device: str, looked: Looked) -> None:
    leaves = operands(device)
    gradients(leaves)
    shape, count = leaves[0].shape, leaves[0].numel()
    arrived = {
        "transposed": torch.randn(*shape[:2], *reversed(shape[2:]), device=device).transpose(-1, -2),
        "expanded": torch.randn((), device=device).expand(shape),
        "negated": torch.randn(shape, dtype=torch.complex64, device=device).conj().imag,
        "misaligned": torch.randn(count + 1, device=device)[1:].view(shape),
        "misaligned again": torch.randn(count + 1, device=device)[1:].view(shape),
    }
    counts = {}
    for name, dy in arrived.items():
        looked.counts()
        agree(gradients(leaves, dy), exact(leaves, dy))
        counts[name] = looked.counts()
    assert counts == {**dict.fromkeys(arrived, (1, 1)), "misaligned": (1, 0), "misaligned again": (0, 1)}


@each_device
@pytest.mark.parametrize("due", [(0,), (1,), (0, 2)], ids=str)
def test_only_what_is_due_is_made(due: tuple[int, ...], device: str, looked: Looked) -> None:
    leaves = operands(device)
    everything = gradients(leaves)
    for place, leaf in enumerate(leaves):
        leaf.requires_grad_(place in due)
    for _ in range(2):
        found = gradients(leaves)
        assert all(torch.equal(gradient, everything[place]) for place, gradient in zip(due, found, strict=True))
    assert looked.counts() == (2, 1)


@each_device
@pytest.mark.parametrize("absent", [(1,), (2,), (1, 2)], ids=str)
def test_vectors_that_were_not_there_are_read(absent: tuple[int, ...], device: str, looked: Looked) -> None:
    """Of x alone a gradient is due, so that it says nothing of them."""
    x, *vectors = operands(device)
    frozen = [x, *(vector.detach() for vector in vectors)]
    without: list[Any] = [None if place in absent else leaf for place, leaf in enumerate(frozen)]
    for leaves in (without, frozen, without):
        y = normforge.group_norm(x, GROUPS, leaves[1], leaves[2], activation="silu")
        wide = x.detach().double().requires_grad_()
        weight, bias = (None if leaf is None else leaf.double() for leaf in leaves[1:])
        wanted = torch.nn.functional.silu(torch.nn.functional.group_norm(wide, GROUPS, weight, bias))
        dy = torch.randn_like(y)
        agree(torch.autograd.grad(y, [x], dy), torch.autograd.grad(wanted, [wide], dy.double()))
    assert looked.counts() == (2, 1)


@each_device
def test_under_batch_invariance_calls_are_known_by_themselves(device: str, looked: Looked) -> None:
    gradients(operands(device))
    with normforge.batch_invariant():
        found = [gradients(operands(device)) for _ in range(2)]
    assert looked.counts() == (2, 1)
    assert all(map(torch.equal, *found))
