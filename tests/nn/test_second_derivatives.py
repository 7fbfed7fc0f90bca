"""Gradients of gradients, which torch's operators compute from the formula of the kernels, held against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge
from proving.cases import EPS, close

from .models import WideLayerNorm
from .oracle import each_norm


@each_norm
def test_a_third_derivative(norm: str) -> None:
    """Held against the formula: torch 2.13's of its own layer_norm is another, in fp64 too."""
    function: Any = getattr(normforge, f"{norm}_norm")
    x, directions = torch.randn(3, 24), torch.randn(3, 3, 24)

    def formula(s: torch.Tensor, shape: Any, eps: float) -> torch.Tensor:
        centred = s - s.mean(-1, keepdim=True) if norm == "layer" else s
        return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()

    def third(call: Any, leaf: torch.Tensor) -> torch.Tensor:
        gradient = call(leaf, (24,), eps=EPS).square()
        for step, direction in enumerate(directions.to(leaf.dtype)):
            (gradient,) = torch.autograd.grad((gradient * direction).sum(), leaf, create_graph=step < 2)
        assert isinstance(gradient, torch.Tensor)
        return gradient

    found = third(function, x.clone().requires_grad_())
    assert not found.requires_grad
    close("third derivative", found, third(formula, x.double().requires_grad_()), 1e-4)


@each_norm
def test_rows_that_are_rounded_before_the_weight(norm: str) -> None:
    """A rounding has the gradient 1, as where torch rounds."""
    function: Any = getattr(normforge, f"{norm}_norm")
    x, weight = torch.randn(4, 24).bfloat16().requires_grad_(), torch.randn(24).requires_grad_()

    def theirs() -> Any:
        return function(x.float(), (24,), eps=EPS).to(torch.bfloat16).float() * weight

    def penalty(y: torch.Tensor) -> Any:
        gradients = torch.autograd.grad(y.float().square().sum(), (x, weight), create_graph=True)
        return torch.autograd.grad([gradient.float().square().sum() for gradient in gradients], (x, weight))

    found, expected = penalty(function(x, (24,), weight, eps=EPS, cast="before_weight")), penalty(theirs())
    for a, b in zip(found, expected, strict=True):
        close("second derivative", a, b.double(), 5e-2)


def test_a_change_between_the_passes_is_noticed() -> None:
    weight = torch.randn(24, requires_grad=True)
    x = torch.randn(3, 24, requires_grad=True)
    (dx,) = torch.autograd.grad(normforge.rms_norm(x, (24,), weight).square().sum(), x, create_graph=True)
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(dx.sum(), x)


def patched(kind: Callable[..., torch.nn.Module]) -> torch.nn.Module:
    """Return a patched norm of two elements, which computes by normforge where torch's own second tangent is wrong."""
    model = torch.nn.Sequential(kind(2, eps=0.25))
    next(model.parameters()).data = torch.tensor([1.0, 2.0])
    assert len(normforge.patch(model).swapped) == 1
    return model


@pytest.mark.parametrize("kind", [None, torch.nn.LayerNorm, WideLayerNorm], ids=["function", "LayerNorm", "wide"])
def test_the_second_tangent_of_a_layer_norm(kind: Callable[..., torch.nn.Module] | None) -> None:
    """In torch's own, patched or not, see pytorch#196700."""
    model = None if kind is None else patched(kind)

    def f(t: torch.Tensor) -> torch.Tensor:
        row = torch.stack([t, torch.zeros_like(t)])
        if model is None:
            return normforge.layer_norm(row, (2,), torch.tensor([1.0, 2.0], dtype=t.dtype), eps=0.25).sum()
        y: torch.Tensor = model(row)
        return y.sum()

    def along(f: Any) -> Any:
        return lambda t: torch.func.jvp(f, (t,), (torch.ones_like(t),))[1]

    ways: list[tuple[Any, Any]] = [
        (torch.func.jacfwd, torch.func.jacfwd),
        (torch.func.jacfwd, torch.func.jacrev),
        (along, along),
    ]
    for dtype in (torch.float32, torch.float64):
        t = torch.tensor(0.7, dtype=dtype)
        if model is not None:
            model.to(dtype)
        for first, then in ways:
            assert then(first(f))(t).item() == pytest.approx(0.7749, abs=1e-4)
