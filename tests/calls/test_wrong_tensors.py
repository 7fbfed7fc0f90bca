"""One tensor of a call is wrong: every function names the tensor, says what is wrong, and says so after good calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge
from normforge import errors

from ..calling import same_bits
from .shared import backward_operands

pytestmark = pytest.mark.usefixtures("nothing_known")

M, N = 4, 64
E4M3, FP4 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2


def rows(*names: str) -> dict[str, Any]:
    return {name: torch.randn(M, N) for name in names}


def vectors(*names: str) -> dict[str, Any]:
    return {name: torch.rand(N) + 0.5 for name in names}


FUSED = {"fadd": "pre_add_store", "fquant": "smooth_dynamic", "save_mv": True}
OUTS: dict[str, Any] = {"out": torch.zeros(M, N, dtype=torch.int8), "residual_out": torch.zeros(M, N)}
NVFP4 = {"out_dtype": FP4, "group_size": 16, "scale_format": "e4m3", "global_scale": torch.ones(1)}
# A function, and what a good call of the function passes, by what the call has.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "plain": (normforge.layernorm2d_fwd, {**rows("x", "out"), **vectors("weight", "bias", "x_bias")}),
    "fused": (
        normforge.rmsnorm2d_fwd,
        {**rows("x", "residual"), **vectors("weight", "x_bias", "smooth_scale"), **FUSED, **OUTS},
    ),
    "fp8": (
        normforge.rmsnorm2d_fwd,
        {"x": torch.ones(M, N).to(E4M3), "x_scale": torch.ones(M), **vectors("weight"), "out_dtype": torch.bfloat16},
    ),
    "dropout": (
        normforge.layernorm2d_fwd,
        {**rows("x", "residual"), "fadd": "pre_add", "dropout_p": 0.5, "dropout_rng": torch.tensor([1, 2])},
    ),
    "backward": (normforge.layernorm2d_bwd, {**backward_operands("layer", M, N), "wants": ("dx", "dweight", "dbias")}),
    "backward, rms": (normforge.rmsnorm2d_bwd, backward_operands("rms", M, N)),
    "quantised": (
        normforge.quantised_layer_norm,
        {**rows("x", "residual"), **vectors("weight", "bias", "smooth_scale"), "fquant": "smooth_dynamic"},
    ),
    "quantised into": (
        normforge.quantised_rms_norm,
        {**rows("x", "residual"), "fquant": "dynamic", **OUTS, "y_scale": torch.zeros(M)},
    ),
    "static": (normforge.quantised_rms_norm, {**rows("x"), "fquant": "static", "y_scale": torch.ones(1)}),
    "by columns": (normforge.quantised_rms_norm, {**rows("x"), "fquant": "static", **vectors("y_scale")}),
    "bounded": (normforge.quantised_rms_norm, {**rows("x"), "out_dtype": E4M3, "scale_ub": torch.ones(1)}),
    "NVFP4": (normforge.quantised_rms_norm, {**rows("x"), **NVFP4}),
    "modulated": (
        normforge.modulated_layernorm2d_fwd,
        {**rows("x", "scale", "shift", "gate", "residual"), **vectors("weight"), "fquant": "dynamic", **OUTS},
    ),
    "gated": (normforge.gated_rmsnorm2d_fwd, {**rows("x", "gate"), **vectors("weight"), "fquant": "dynamic"}),
}


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose storage is freed, as sharding frees parameters that are not in use."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def of_inference(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that is written to in inference mode alone."""
    with torch.inference_mode():
        return tensor.clone()


# What is wrong with a tensor, the error, and what the message says behind the tensor's name.
WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "a number": (lambda tensor: 2.0, errors.DTypeError, " is (a float|float|2.0); it takes"),
    "False": (lambda tensor: False, errors.DTypeError, " is (a bool|bool|False); it takes"),
    "of doubles": (torch.Tensor.double, errors.DTypeError, " (has dtype|is) torch.float64; it takes"),
    "elsewhere": (lambda tensor: tensor.to("meta"), errors.DeviceError, " is on meta and x on cpu; move one to the o"),
    "sparse": (
        lambda tensor: torch.zeros(tensor.shape).to_sparse(),
        errors.LayoutError,
        " is in layout torch.sparse_coo",
    ),
    "shorter": (lambda tensor: tensor[:-1], errors.ShapeError, r" has shape \(.*\d+,?\)"),
    "of every other element": (
        lambda tensor: torch.stack((tensor,) * 2, -1)[..., 0],
        errors.LayoutError,
        " has strides? ",
    ),
    "without memory": (without_memory, errors.LayoutError, r" \(.*\) has no memory .*storage was freed"),
    "trained": (lambda tensor: tensor.clone().requires_grad_(), errors.GradientError, " requires a gradient and "),
    "negated": (lambda tensor: torch._neg_view(tensor.clone()), errors.LayoutError, " is a view that negates its mem"),
    "of inference": (of_inference, errors.GradientError, r" is an inference tensor, .*\.clone\(\)$"),
}


def can_be(wrong: str, name: str, tensor: torch.Tensor) -> bool:
    """Return True if a tensor that is wrong in a way is all that is wrong with a call, and is refused."""
    match wrong:
        case "negated" | "of inference":
            return name in ("out", "residual_out")
        case "trained":
            return tensor.is_floating_point()
        case "shorter":
            # Beside an x of another shape the other tensors are wrong.
            return name != "x" and tensor.numel() > 1
        case "of every other element":
            return tensor.numel() > 1
        case "elsewhere":
            # Beside an x elsewhere, the others are.
            return name != "x"
        case "sparse":
            return name != "dropout_rng"
    return True


def refused(function: Callable[..., Any], given: dict[str, Any]) -> tuple[type[Exception], str]:
    """Return the error of a call that is refused."""
    with pytest.raises(errors.NormforgeError) as raised:
        function(**given)
    return type(raised.value), str(raised.value)


@pytest.mark.parametrize(("function", "given"), CALLS.values(), ids=CALLS)
def test_refused_by_its_name(function: Callable[..., Any], given: dict[str, Any]) -> None:
    bad = {
        (name, wrong): given | {name: change(tensor)}
        for name, tensor in given.items()
        for wrong, (change, _, _) in WRONG.items()
        if isinstance(tensor, torch.Tensor) and can_be(wrong, name, tensor)
    }
    cold = {of: refused(function, each) for of, each in bad.items()}
    for (name, wrong), (found, message) in cold.items():
        _, error, says = WRONG[wrong]
        assert found is error, message
        assert re.match(name + says, message), message
    for _ in range(2):
        expected = function(**given)
    with torch.no_grad():
        untrained = [function(**each) for (_, wrong), each in bad.items() if wrong == "trained"]
    assert all(same_bits(*pair) for each in untrained for pair in zip(each, expected, strict=True))
    assert {of: refused(function, each) for of, each in bad.items()} == cold
