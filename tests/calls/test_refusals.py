"""Gradients that do not exist are refused, and `which` says what the functional API would run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import normforge
from normforge.errors import ConflictError, DTypeError, GradientError
from normforge.families.public import layernorm2d_bwd, rmsnorm2d_bwd

from ..calling import FORWARD, each_norm, same_bits
from .shared import BACKWARD, backward_operands

M, N = 3, 64


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", ["x", "weight", "bias", "residual", "x_bias", "smooth_scale"])
def test_a_quantised_output_has_no_gradient(name: str, known: bool) -> None:
    tensors: dict[str, Any] = {"x": torch.randn(3, N), "residual": torch.randn(3, N)}
    tensors |= {vector: torch.randn(N) for vector in ("weight", "bias", "x_bias", "smooth_scale")}
    modes: dict[str, Any] = {"fadd": "pre_add_store", "fquant": "smooth_dynamic"}
    if known:
        normforge.layernorm2d_fwd(**tensors, **modes)
    tensors[name].requires_grad_()
    with pytest.raises(GradientError, match=rf"^{name} requires a gradient and a quantised output has none"):
        normforge.layernorm2d_fwd(**tensors, **modes)
    with torch.no_grad():
        expected = normforge.layernorm2d_fwd(**tensors, **modes)
    detached = normforge.layernorm2d_fwd(**tensors | {name: tensors[name].detach()}, **modes)
    assert torch.equal(detached.y, expected.y)


def operands(norm: str, *names: str) -> dict[str, torch.Tensor]:
    """Of a forward call; bias only where the norm has one."""
    rows = {"x", "residual"}
    return {
        name: torch.randn(M, N) if name in rows else torch.randn(N) for name in names if (norm, name) != ("rms", "bias")
    }


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@each_norm
def test_forward_functions_do_not_detach_in_silence(norm: str, fused: bool, known: bool) -> None:
    names = ("x", "weight", "bias", "residual", "x_bias") if fused else ("x", "weight", "bias")
    modes: dict[str, Any] = {"fadd": "pre_add_store"} if fused else {}
    tensors = operands(norm, *names)
    for name, tensor in tensors.items():
        if known:
            FORWARD[norm](**tensors, **modes)
        for asking in (torch.nn.Parameter(tensor), tensor.clone().requires_grad_() * 1):
            given = tensors | {name: asking}
            with pytest.raises(GradientError, match=rf"^{name} requires a gradient and .*call normforge.layer_norm, "):
                FORWARD[norm](**given, **modes)
            with torch.no_grad():
                expected = FORWARD[norm](**given, **modes)
            detached = FORWARD[norm](**tensors | {name: asking.detach()}, **modes)
            assert all(same_bits(a, b) for a, b in zip(detached, expected, strict=True))


def test_which_says_so_too_unless_it_is_asked_about_what_is_differentiable() -> None:
    x = torch.randn(M, N, requires_grad=True)
    with pytest.raises(GradientError, match=r"^x requires a gradient and the forward functions compute none"):
        normforge.which(x)
    assert normforge.which(x, functional=True) == normforge.which(x.detach())


@pytest.mark.parametrize("known", [False, True])
@each_norm
def test_backward_functions_do_not_detach_in_silence(norm: str, known: bool) -> None:
    tensors = backward_operands(norm)
    expected = BACKWARD[norm](**tensors)
    for name, tensor in tensors.items():
        if known:
            BACKWARD[norm](**tensors)
        given = tensors | {name: tensor.clone().requires_grad_()}
        with pytest.raises(GradientError, match=f"^{name} requires a gradient and no kernel computes a gradient's"):
            BACKWARD[norm](**given)
        with torch.no_grad():
            assert same_bits(BACKWARD[norm](**given).dx, expected.dx)


@pytest.mark.parametrize("known", [False, True])
def test_a_weight_offset_without_weight_is_refused_backward_too(known: bool) -> None:
    given = backward_operands("rms")
    del given["weight"]
    if known:
        rmsnorm2d_bwd(**given)
    with pytest.raises(ConflictError, match=r"^weight_offset=1.0 is added to weight and none was passed; pass weight$"):
        rmsnorm2d_bwd(**given, weight_offset=1.0)
    weighted = rmsnorm2d_bwd(**given, weight=torch.ones(N), weight_offset=0)
    assert same_bits(rmsnorm2d_bwd(**given, weight_offset=0).dx, weighted.dx)


@pytest.mark.parametrize("offset", [float("nan"), float("inf"), 1e39, "1", True])
def test_a_weight_offset_that_fp32_cannot_hold_is_refused_backward_too(offset: Any) -> None:
    for _ in range(2):
        with pytest.raises(ConflictError, match=r"^weight_offset=.* will not do; it takes a number that is finite"):
            rmsnorm2d_bwd(**backward_operands("rms"), weight_offset=offset)


@pytest.mark.parametrize("name", ["mean", "rstd"])
@pytest.mark.parametrize("known", [False, True])
def test_statistics_that_are_not_there_are_asked_for(name: str, known: bool) -> None:
    given = backward_operands("layer")
    if known:
        layernorm2d_bwd(**given)
    with pytest.raises(DTypeError, match=f"^{name} is NoneType; it takes the torch.float32 tensor that the forward"):
        layernorm2d_bwd(**given | {name: None})


def test_which_knows_the_functional_api() -> None:
    x = torch.randn(3, N)
    assert normforge.which(x, functional=True) == normforge.which(x) == "ln_fwd_fp32_n128"


def test_which_says_torch_where_no_kernel_runs() -> None:
    program = (
        "import torch, normforge; x = torch.randn(3, 64); "
        "print(normforge.which(x, functional=True), normforge.which(x)); "
        "print(normforge.which(x, norm='rms', functional=True))"
    )
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["torch", "ln_fwd_fp32_n128", "torch"]
