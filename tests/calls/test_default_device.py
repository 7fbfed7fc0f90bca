"""A default device, or type, of the caller's is nothing to calls that bring their tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import normforge
from proving.cases import Case, Tensors, cases, operands

from .shared import BACKWARD, backward_operands

N = 32
X, WEIGHT = torch.linspace(-1, 2, 3 * N).reshape(3, N), torch.linspace(0.5, 1.5, N)
FUSED: dict[str, Any] = {"residual": X.flip(0), "fadd": 1, "fquant": 1, "smooth_scale": WEIGHT, "save_mv": True}
MODES = ["ln_fwd_bf16", "rms_fwd_bf16_addst", "rms_bwd_bf16_addst", "ln_fwd_fp16_xb", "ln_bwd_bf16"]


def differentiated(case: Case, given: Tensors) -> Any:
    outputs = case.run(given)
    return *outputs, *torch.autograd.grad(outputs[0].square().sum(), list(given.values()))


CALLS: dict[str, Callable[[], Any]] = {
    **{
        function.__name__: partial(function, X, WEIGHT, **FUSED)
        for function in (normforge.layernorm2d_fwd, normforge.rmsnorm2d_fwd, normforge.reference.layernorm2d_fwd)
    },
    **{f"{norm}, backward": partial(BACKWARD[norm], **backward_operands(norm, 3, N)) for norm in BACKWARD},
    "no dy": partial(BACKWARD["layer"], **{**backward_operands("layer", 3, N), "dy": None}),
    **{str(case): partial(differentiated, case, operands(case)) for case in cases(vary=("norm",))},
    "compile_keys": lambda: [str(key) for key in normforge.compile_keys([N, 4096], MODES, arch="sm_90")],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_default_device_and_type_change_nothing(call: Callable[[], Any]) -> None:
    wanted = list(call())
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            actual = list(call())
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(
        *([each for each in of if isinstance(each, torch.Tensor)] for of in (actual, wanted)), rtol=0, atol=0
    )
    assert [each for each in actual if isinstance(each, str)] == [each for each in wanted if isinstance(each, str)]
