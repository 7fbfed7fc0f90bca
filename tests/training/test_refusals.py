"""Gradients that do not exist are refused, and `which` says what the functional API would run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import normforge
from normforge.errors import GradientError

N = 64


@pytest.mark.parametrize("name", ["x", "weight", "bias", "residual", "x_bias", "smooth_scale"])
def test_a_quantised_output_has_no_gradient(name: str) -> None:
    tensors: dict[str, Any] = {"x": torch.randn(3, N), "residual": torch.randn(3, N)}
    tensors |= {vector: torch.randn(N) for vector in ("weight", "bias", "x_bias", "smooth_scale")}
    tensors[name].requires_grad_()
    modes: dict[str, Any] = {"fadd": "pre_add_store", "fquant": "smooth_dynamic"}
    with pytest.raises(GradientError, match=rf"^{name} requires a gradient and a quantised output has none"):
        normforge.layernorm2d_fwd(**tensors, **modes)
    with torch.no_grad():
        expected = normforge.layernorm2d_fwd(**tensors, **modes)
    detached = normforge.layernorm2d_fwd(**tensors | {name: tensors[name].detach()}, **modes)
    assert torch.equal(detached.y, expected.y)


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
