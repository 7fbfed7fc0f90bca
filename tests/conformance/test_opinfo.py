"""PyTorch's own samples and error inputs of layer_norm and rms_norm, and what the table of cases cannot say."""

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
from normforge.codegen.tiling import SOME_M
from normforge.errors import ConflictError, NormforgeError
from proving.cases import cases, close, gradients, operands
from proving.conformance.case import BF16, FP16, FP32

from ..calling import FORWARD, each_device, each_norm

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
            # Torch returns NaN: a variance of less than -eps has no root.
            with pytest.raises(ConflictError, match=r"eps.*-0\.5"):
                getattr(normforge, name)(sample.input, *sample.args, **sample.kwargs)
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


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {"layer": normforge.layer_norm, "rms": normforge.rms_norm}
TORCH: dict[str, Callable[..., torch.Tensor]] = {"layer": functional.layer_norm, "rms": functional.rms_norm}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(5000, 100), (4096, 1024), (4096, 5120), (999, 8192), (500, 40000), (32744, 4099)], ids=str
)
@each_norm
def test_two_runs_give_the_same_bits(norm: str, shape: tuple[int, int]) -> None:
    (case,) = cases("plain", vary=(), norm=norm, shape=shape, without=("residual", "x_bias"), dtype=BF16)
    given = operands(case, "cuda")
    dy = torch.randn_like(given["x"])

    def once() -> list[torch.Tensor]:
        outputs = case.run(given)
        return [*outputs, *gradients(outputs, given, [dy]).values()]

    first = once()
    for _ in range(3):
        for a, b in zip(first, once(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 64, 4096, 65536])
@each_norm
def test_more_than_2_to_the_31_elements(norm: str, n: int) -> None:
    """Every element is written, and rows at the end of memory are what the same rows are by themselves."""
    rows = (1 << 31) // n + 5
    # Fewer may have another tile, which adds a row up in another order.
    many = SOME_M + 1
    x = torch.zeros(rows, n, dtype=torch.float16, device="cuda")
    x[-many:] = torch.randn(many, n, dtype=torch.float16, device="cuda")
    y = torch.full_like(x, float("nan"))
    FORWARD[norm](x, out=y)
    assert torch.equal(y[-many:], FORWARD[norm](x[-many:].clone()).y)
    # NaN shows in a sum, which needs no M×N of its own.
    assert not torch.stack([part.sum(dtype=torch.float32) for part in torch.split(y, 1 << 24)]).isnan().any()
    assert not y[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 4096, 65536])
@each_norm
def test_the_gradient_of_more_than_2_to_the_31_elements(norm: str, n: int) -> None:
    rows = (1 << 31) // n + 5
    x = torch.zeros(rows, n, dtype=torch.bfloat16, device="cuda")
    x[-300:] = torch.randn(300, n, dtype=torch.bfloat16, device="cuda")
    dy = torch.zeros_like(x)
    dy[-300:] = torch.randn_like(x[-300:])
    weight = torch.randn(n, device="cuda")
    found = []
    for inputs, gradient in ((x, dy), (x[-300:].clone(), dy[-300:].clone())):
        leaves = [inputs.requires_grad_(), weight.clone().requires_grad_()]
        found.append(torch.autograd.grad(FUNCTIONS[norm](leaves[0], (n,), leaves[1], eps=1e-5), leaves, gradient))
    (dx, dweight), (few_dx, few_dweight) = found
    torch.testing.assert_close(dx[-300:], few_dx, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(dweight, few_dweight, rtol=1e-4, atol=1e-3)
    assert not dx[0].any()
    assert not dx[rows // 2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 1500, 5137, 33000])
@each_norm
def test_a_row_stride_times_a_row_past_int32(norm: str, n: int) -> None:
    """Other libraries' addresses wrapped around. Forward, with an output as far apart, and backward."""
    stride = (1 << 31) // 4 + 8

    def spread() -> torch.Tensor:
        memory = torch.empty(5 * stride + n, dtype=FP16, device="cuda")
        return memory.as_strided((6, n), (stride, 1))

    x, out, dy = spread(), spread(), spread()
    x.copy_(torch.randn(6, n, dtype=FP16, device="cuda"))
    dy.copy_(torch.randn(6, n, dtype=FP16, device="cuda"))
    FORWARD[norm](x, out=out, eps=1e-5)
    leaf, exact = x.detach().requires_grad_(), x.double().requires_grad_()
    y, want = (functions[norm](rows, (n,), eps=1e-5) for functions, rows in ((FUNCTIONS, leaf), (TORCH, exact)))
    (dx,) = torch.autograd.grad(y, leaf, dy)
    (exact_dx,) = torch.autograd.grad(want, exact, dy.double())
    for got, of in ((y, want), (out, want), (dx, exact_dx)):
        torch.testing.assert_close(got.double(), of, rtol=1e-3, atol=1e-3)
