"""A model beside a patched copy: how both are made and compared, and how often what patch fuses was computed."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge

Tensors = dict[str, torch.Tensor]


def twins(model: Any) -> tuple[Any, Any]:
    """Return a model and a patched copy of it."""
    patched = copy.deepcopy(model)
    normforge.patch(patched)
    return model, patched


def copies(module: Any) -> tuple[Any, Any]:
    """Return a copy of a module, and what torch loads of the module that it saved."""
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return copy.deepcopy(module), torch.load(buffer, weights_only=False)


def results(module: torch.nn.Module, x: torch.Tensor, *beside: torch.Tensor | None) -> tuple[torch.Tensor, Tensors]:
    """Return what a module makes of x, and gradients of x and parameters by one that arrives, the same for all."""
    leaf = x.detach().clone().requires_grad_()
    leaves = {"x": leaf, **dict(module.named_parameters())}
    y = module(leaf, *beside)
    arriving = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return y.detach(), dict(zip(leaves, torch.autograd.grad(y, [*leaves.values()], arriving), strict=True))


def assert_near(actual: Tensors, wanted: Tensors, tolerance: float, least: float) -> None:
    """Fail unless tensors differ by no more than a tolerance of their own size, or of `least` where that is more."""
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        size = max(tensor.abs().max().item(), least)
        torch.testing.assert_close(actual[name].double(), tensor.double(), rtol=0, atol=tolerance * size, msg=name)


class Counted:
    """How often functions of a module made something, by function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> None:
        self._counts = dict.fromkeys(names, 0)
        for name in names:
            monkeypatch.setattr(module, name, self.counting(name, getattr(module, name)))

    def counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose results are counted under a name."""

        def counted(*args: Any) -> Any:
            result = function(*args)
            self._counts[name] += result is not None
            return result

        return counted

    def counts(self) -> tuple[int, ...]:
        """Return the counts since this was called last."""
        found = tuple(self._counts.values())
        self._counts = dict.fromkeys(self._counts, 0)
        return found
