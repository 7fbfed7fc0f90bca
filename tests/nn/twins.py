"""A model beside a patched copy: how both are made and compared, and how often what patch fuses was computed."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import normforge

Tensors = dict[str, torch.Tensor]


class Asked(torch.Tensor):
    """A tensor that writes down which functions it is asked about."""

    functions: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.functions.append(function)
        inherited: Any = super().__torch_function__
        return inherited(function, types, args, kwargs or {})


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
    """Return what a module makes of x, and the gradients by one that arrives, the same for all modules.

    The gradients are those of x, of other operands that require one and of parameters; of what is not used, zeros.
    """
    leaf = x.detach().clone().requires_grad_()
    others = {str(at): each for at, each in enumerate(beside) if each is not None and each.requires_grad}
    leaves = {"x": leaf, **others, **dict(module.named_parameters())}
    y = module(leaf, *beside)
    arriving = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    gradients = torch.autograd.grad(y, [*leaves.values()], arriving, materialize_grads=True)
    return y.detach(), dict(zip(leaves, gradients, strict=True))


def assert_near(actual: Tensors, wanted: Tensors, tolerance: float, least: float) -> None:
    """Fail unless tensors differ by no more than a tolerance of their own size, or of `least` where that is more."""
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        size = max(tensor.abs().max().item(), least)
        torch.testing.assert_close(actual[name].double(), tensor.double(), rtol=0, atol=tolerance * size, msg=name)


def assert_same_results(
    patched: torch.nn.Module, model: torch.nn.Module, *given: Any, tolerance: float = 2e-5, least: float = 1.0
) -> None:
    """Fail unless a patched model makes of tensors what the model makes of them, and gradients are the same."""
    (y, found), (wanted, exact) = (results(each, *given) for each in (patched, model))
    assert y.dtype == wanted.dtype
    assert_near({"y": y, **found}, {"y": wanted, **exact}, tolerance, least)


class Counted:
    """How often functions made something: each a module or a class and its attribute, by a name of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **functions: tuple[Any, str]) -> None:
        self._counts: Counter[str] = Counter()
        for name, (module, function) in functions.items():
            monkeypatch.setattr(module, function, self._counting(name, getattr(module, function)))

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            result = function(*args)
            self._counts.update([name] if result is not None else [])
            return result

        return counted

    def counts(self) -> dict[str, int]:
        """Return the counts since this was called last, of what was made at all."""
        found, self._counts = dict(self._counts), Counter()
        return found
