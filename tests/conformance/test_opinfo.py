"""PyTorch's own samples and error inputs of layer_norm and rms_norm: values, gradients and refusals."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

import normforge
from normforge.errors import ConflictError, NormforgeError
from proving.cases import close
from proving.conformance.case import BF16, FP16, FP32

from ..calling import each_device

# Of a value, and of a gradient beside the largest of its tensor.
TOLERANCE = {FP16: 5e-3, BF16: 2e-2, FP32: 1e-4}

each_operator = pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
each_float = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def import_invocations() -> ModuleType:
    """PyTorch's table of operators, with samples of each."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("expecttest") is None:
            # PyTorch's test cases are of a class of expecttest's, which it does not install. Samples need none of it.
            stand_in = ModuleType("expecttest")
            stand_in.__dict__["TestCase"] = unittest.TestCase
            patch.setitem(sys.modules, "expecttest", stand_in)
        # The import forbids the rest of the process to set flags of backends.
        patch.setitem(vars(torch.backends), "__allow_nonbracketed_mutation_flag", True)
        return importlib.import_module("torch.testing._internal.common_methods_invocations")


def tensors(value: Any) -> Iterator[torch.Tensor]:
    yield from (leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def called(function: Callable[..., Any], sample: Any) -> list[torch.Tensor]:
    """The results of a sample, and the gradients of the first by those of its tensors that require one."""
    results = list(tensors(function(sample.input, *sample.args, **sample.kwargs)))
    y = results[0]
    leaves = [leaf for leaf in tensors((sample.input, sample.args, sample.kwargs)) if leaf.requires_grad]
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).view(y.shape).to(y.dtype)
    return [*results, *torch.autograd.grad(y, leaves, dy)]


@each_device
@each_float
@each_operator
def test_samples(name: str, dtype: torch.dtype, device: str, op_infos: dict[str, Any]) -> None:
    count = 0
    for sample in op_infos[name].sample_inputs(device, dtype, requires_grad=True):
        if sample.kwargs.get("eps", 0.0) < 0:
            continue
        assert normforge.backend(sample.input) == "kernel"
        exact = called(getattr(functional, name), sample.transform(in_fp64))
        for got, want in zip(called(getattr(normforge, name), sample), exact, strict=True):
            assert (got.dtype, got.shape) == (dtype, want.shape)
            close("sample", got.detach(), want.detach(), TOLERANCE[dtype])
        count += 1
    assert count >= 5


def in_fp64(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


@each_device
@each_operator
def test_samples_with_an_eps_below_0_are_refused(name: str, device: str, op_infos: dict[str, Any]) -> None:
    """A variance of less than -eps has no root: torch returns NaN for it, and here eps is at least 0."""
    for sample in op_infos[name].sample_inputs(device, FP32, requires_grad=False):
        if sample.kwargs.get("eps", 0.0) < 0:
            with pytest.raises(ConflictError, match=r"eps.*-0\.5"):
                getattr(normforge, name)(sample.input, *sample.args, **sample.kwargs)


def _error_inputs(name: str, op_infos: dict[str, Any], device: str) -> list[tuple[torch.Tensor, tuple[Any, ...]]]:
    """Those of rms_norm serve layer_norm too, which has none of its own: a bias goes before eps."""
    inputs: list[tuple[torch.Tensor, tuple[Any, ...]]] = []
    for error_input in op_infos["rms_norm"].error_inputs(device):
        sample = error_input.sample_input
        shape, weight, eps = sample.args
        inputs.append((sample.input, (shape, weight, eps)))
        if name == "layer_norm":
            inputs[-1] = (sample.input, (shape, weight, None, eps))
            inputs.append((sample.input, (shape, None, weight, eps)))
    return inputs


@each_device
@each_operator
def test_error_inputs(name: str, device: str, op_infos: dict[str, Any]) -> None:
    inputs = _error_inputs(name, op_infos, device)
    assert len(inputs) >= 3
    for x, arguments in inputs:
        with pytest.raises(RuntimeError):
            getattr(functional, name)(x, *arguments)
        with pytest.raises(NormforgeError) as refused:
            getattr(normforge, name)(x, *arguments)
        assert isinstance(refused.value, ValueError | TypeError | RuntimeError)
