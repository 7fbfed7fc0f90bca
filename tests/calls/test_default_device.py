"""A default device, or type, of the caller's is nothing to calls that bring their tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import normforge
from normforge.families.public import layernorm2d_bwd, rmsnorm2d_bwd
from proving.cases import Case, cases, operands

N = 32


def vector() -> torch.Tensor:
    return torch.linspace(0.5, 1.5, N)


def rows() -> torch.Tensor:
    return torch.linspace(-1, 2, 3 * N).reshape(3, N)


def quantised(function: Callable[..., Any]) -> Callable[[], Any]:
    x, weight, residual = rows(), vector(), rows().flip(0)
    given: dict[str, Any] = {"residual": residual, "fadd": 1, "fquant": 1, "smooth_scale": weight, "save_mv": True}
    return lambda: function(x, weight, **given)


def differentiated(case: Case) -> Callable[[], Any]:
    given = operands(case)

    def run() -> Any:
        outputs = case.run(given)
        return *outputs, *torch.autograd.grad(outputs[0].square().sum(), list(given.values()))

    return run


def gradients(norm: str) -> Callable[[], Any]:
    x, weight, statistic = rows(), vector(), torch.tensor([0.5, 1.0, 2.0])
    wants = ("dx", "dweight")
    if norm == "rms":
        return lambda: rmsnorm2d_bwd(x, x, weight, rstd=statistic, wants=wants)
    return lambda: layernorm2d_bwd(None, x, weight, mean=statistic, rstd=statistic, dresidual_out=x, wants=wants)


def keys() -> list[str]:
    modes = ["ln_fwd_bf16", "rms_fwd_bf16_addst", "rms_bwd_bf16_addst", "ln_fwd_fp16_xb", "ln_bwd_bf16"]
    return list(map(str, normforge.compile_keys([N, 4096], modes, arch="sm_90")))


CALLS: dict[str, Callable[[], Callable[[], Any]]] = {
    "layernorm2d_fwd": lambda: quantised(normforge.layernorm2d_fwd),
    "rmsnorm2d_fwd": lambda: quantised(normforge.rmsnorm2d_fwd),
    "reference": lambda: quantised(normforge.reference.layernorm2d_fwd),
    "layernorm2d_bwd": lambda: gradients("layer"),
    "rmsnorm2d_bwd": lambda: gradients("rms"),
    **{str(case): partial(differentiated, case) for case in cases(vary=("norm",))},
    "compile_keys": lambda: keys,
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_a_default_device_and_type_change_nothing(make: Callable[[], Callable[[], Any]]) -> None:
    call = make()
    wanted = list(call())
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            actual = list(call())
    finally:
        torch.set_default_dtype(torch.float32)
    for got, expected in zip(actual, wanted, strict=True):
        if isinstance(expected, torch.Tensor):
            assert got.device == expected.device
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)
        else:
            assert got == expected
