"""The functional API: gradients against fp64 autograd, and everything else torch's functions promise."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import normforge
from proving.cases import EPS, check, gradients, operands

from ..calling import backward, each_add, each_device, each_float, each_norm, plain, same_bits

TORCH: dict[str, Callable[..., torch.Tensor]] = {"layer": functional.layer_norm, "rms": functional.rms_norm}
OURS: dict[str, Callable[..., torch.Tensor]] = {"layer": normforge.layer_norm, "rms": normforge.rms_norm}


@each_device
@pytest.mark.parametrize(("dtype", "residual"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@each_add
def test_each_gradient_is_rounded_once(norm: str, dtype: torch.dtype, residual: torch.dtype, device: str) -> None:
    """The one in 16 bits is the other one rounded, and that one has not been."""
    case = plain(norm, shape=(3, 130), dtype=dtype, residual=residual)
    given = operands(case, device)
    outputs = case.run(given)
    found = gradients(outputs, given, [torch.randn_like(output) for output in outputs])
    wide, narrow = sorted((found["x"], found["residual"]), key=lambda gradient: -gradient.dtype.itemsize)
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(wide.bfloat16(), narrow)
    assert not torch.equal(wide, narrow.float())


@each_device
@pytest.mark.parametrize(("shape", "dimensions"), [((4, 3, 5), 2), ((2, 3, 5, 7), 2), ((3, 5), 2)], ids=str)
@each_norm
def test_several_normalised_dimensions(norm: str, shape: tuple[int, ...], dimensions: int, device: str) -> None:
    """They are one long row, forward and backward."""
    last, first = shape[-dimensions:], shape[:-dimensions]
    case = plain(norm, shape=(*first, math.prod(last)))
    given = operands(case, device)
    function = partial(OURS[norm], eps=EPS, normalized_shape=last)
    x, *vectors = (tensor.view(*first, *last) if name == "x" else tensor.view(last) for name, tensor in given.items())
    (wanted,), y = case.run(given), function(x, weight=vectors[0], **dict(zip(["bias"], vectors[1:], strict=False)))
    assert same_bits(y, wanted.view(shape))
    dy = torch.randn_like(wanted)
    found = gradients([y], given, [dy.view(shape)])
    assert all(same_bits(found[name], its) for name, its in gradients([wanted], given, [dy]).items())
    check(case, given, [dy])


@each_norm
@pytest.mark.parametrize("weighted", [False, True])
@each_float
def test_torchs_own_call_and_defaults(norm: str, weighted: bool, dtype: torch.dtype) -> None:
    # So small that eps decides the result.
    x = (torch.randn(3, 40) * 1e-3).to(dtype)
    arguments = {"weight": torch.randn(40).to(dtype)} if weighted else {}
    wanted = TORCH[norm](x, [40], **arguments)
    # The second call is one that is known.
    for _ in range(2):
        torch.testing.assert_close(OURS[norm](x, [40], **arguments), wanted)


@each_norm
def test_signatures_are_torchs(norm: str) -> None:
    every = inspect.signature(OURS[norm]).parameters.values()
    ours = [p for p in every if p.kind is not p.KEYWORD_ONLY]
    assert [p.name for p in every if p not in ours] == ["cast", "weight_offset", "x_bias", "dim", "activation"]
    theirs = list(inspect.signature(TORCH[norm]).parameters.values())
    # torch calls its first one `input`.
    assert [p.name for p in ours[1:]] == [p.name for p in theirs[1:]]
    assert [p.default for p in ours] == [p.default for p in theirs]


@each_norm
def test_a_weight_of_any_stride(norm: str) -> None:
    case = plain(norm, shape=(3, 64))
    check(case, operands(case) | {"weight": torch.randn(128)[::2].requires_grad_()})


@each_device
@each_norm
def test_a_gradient_of_another_type(norm: str, device: str) -> None:
    case = plain(norm, shape=(3, 130))
    check(case, operands(case, device), [torch.randn(3, 130, device=device, dtype=torch.bfloat16)])


@each_norm
def test_changing_x_before_the_backward_pass_is_noticed(norm: str) -> None:
    x = torch.randn(3, 64, requires_grad=True) * 1
    y = OURS[norm](x, (64,))
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(y.sum())


@each_device
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@each_float
@each_norm
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_as_torch(norm: str, dtype: torch.dtype, autocast: torch.dtype, device: str) -> None:
    x = (torch.randn(3, 64, device=device) * 1e-2).to(dtype).requires_grad_()
    weight = torch.randn(64, device=device, requires_grad=True)
    dy = torch.randn(3, 64, device=device)

    def run(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.autocast(device, dtype=autocast):
            y = function(x, (64,), weight)
        return y, *torch.autograd.grad(y, (x, weight), dy.to(y.dtype))

    (y, dx, dweight), (wanted, *exact) = run(OURS[norm]), run(TORCH[norm])
    torch.testing.assert_close((y, dx), (wanted, exact[0]))
    tolerance = 3e-2 if wanted.dtype != torch.float32 else 1e-4
    torch.testing.assert_close(dweight, exact[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("asking", [("weight",), ("bias",), ("x",), ("residual",), ("residual", "weight"), ()], ids=str)
@pytest.mark.parametrize("traced", [False, True])
def test_the_sum_has_a_gradient_where_what_is_summed_has(asking: tuple[str, ...], traced: bool) -> None:
    case = plain("add_layer", shape=(2, 3, 64))
    given = {name: tensor.requires_grad_(name in asking) for name, tensor in operands(case).items()}
    function = torch.compile(case.function, backend="aot_eager", fullgraph=True) if traced else case.function
    for _ in range(2):
        y, total = function(**given)
        assert y.requires_grad == bool(asking)
        assert total.requires_grad == bool({"x", "residual"}.intersection(asking))
        assert gradients((y, total), given, [torch.ones_like(y)] * 2).keys() == {*asking}


@pytest.mark.parametrize(
    "shape", [[64], torch.Size([64]), (64,), (np.int64(64),), (np.uint16(64),), (torch.tensor(64),)], ids=str
)
def test_a_shape_of_any_kind_is_taken_again(shape: Any) -> None:
    for _ in range(2):
        assert not normforge.layer_norm(torch.ones(2, 3, 64), shape).any()
