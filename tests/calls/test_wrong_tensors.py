"""One argument of a call is wrong: every function names the argument and says what is wrong, after good calls too."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge import errors
from normforge.codegen.values import FusedAdd, FusedQuant
from proving.cold_warm.operands import HOLDERS

from ..calling import FORWARD, FUNCTIONS, backward_operands, same_bits, table_at

pytestmark = pytest.mark.usefixtures("nothing_known")

M, N = 4, 64
E4M3, E8M0, FP4 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2


def rows(*names: str) -> dict[str, Any]:
    return {name: torch.randn(M, N) for name in names}


def vectors(*names: str) -> dict[str, Any]:
    return {name: torch.rand(N) + 0.5 for name in names}


def together(
    x: Any,
    weight: Any,
    eps: Any = 1e-6,
    weight_offset: Any = 0.0,
    fquant: Any = "dynamic",
    out_dtype: Any = E4M3,
    cast: Any = "after_weight",
) -> Any:
    """Return the result of the second of two norms of one launch."""
    named = {"eps": eps, "weight_offset": weight_offset, "fquant": fquant, "out_dtype": out_dtype, "cast": cast}
    return normforge.rms_norms([(torch.ones(M, N), None), (x, weight, named)])[1]


# Numbers that equal words of other types, which a dictionary would take for them.
FUSED = {"fadd": 1, "fquant": 1, "save_mv": True, "eps": 1.0}
OUTS: dict[str, Any] = {"out": torch.zeros(M, N, dtype=torch.int8), "residual_out": torch.zeros(M, N)}
SCALES = torch.zeros(M)
MODULATIONS = ("scale", "shift", "gate")
NVFP4: dict[str, Any] = {"out_dtype": FP4, "group_size": 16, "scale_format": "e4m3", "global_scale": torch.ones(1)}
MXFP8: dict[str, Any] = {"out_dtype": E4M3, "group_size": 32, "scale_format": "ue8m0"}
FP8 = {"x": torch.ones(M, N).to(E4M3), "x_scale": torch.ones(M), "out_dtype": torch.bfloat16}
FP8_GRADIENT = {"dy": torch.ones(M, N).to(E4M3), "dy_scale": torch.ones(M, N // 32)}
DROPOUT = {"fadd": "pre_add", "dropout_p": 0.5, "dropout_rng": torch.tensor([1, 2])}
PLAIN, BOTH = {**rows("x"), **vectors("weight")}, rows("x", "residual")
MODULATED = {**rows("x"), **vectors("scale", "shift")}
Call = tuple[Callable[..., Any], dict[str, Any]]
# Calls that gradients may follow: torch's operators serve what no kernel takes, and some rows are copied.
FOLLOWED: dict[str, Call] = {
    **{norm: (FUNCTIONS[norm], {**PLAIN, **vectors("x_bias"), "normalized_shape": (N,)}) for norm in ("layer", "rms")},
    **{norm: (FUNCTIONS[norm], {**BOTH, **vectors("weight", "x_bias")}) for norm in ("add_layer", "add_rms")},
    "add_rms, dropped": (normforge.add_rms_norm, {**BOTH, **vectors("weight"), "dropout_p": 0.3}),
    "add_layer, dropped": (normforge.add_layer_norm, {**BOTH, **vectors("weight"), "dropout_p": 0.3}),
    "group": (normforge.group_norm, {"x": torch.randn(2, 8, 3, 3), "num_groups": 2, "weight": torch.ones(8)}),
    "gated norm": (normforge.gated_layer_norm, {**rows("x", "gate"), **vectors("weight", "bias")}),
    "gated groups": (normforge.gated_rms_norm, {**rows("x", "gate"), **vectors("weight"), "group_size": 8}),
    "modulated norm": (normforge.modulated_layer_norm, MODULATED),
    "modulated rms": (normforge.modulated_rms_norm, MODULATED),
    "modulated samples": (
        normforge.modulated_layer_norm,
        {**dict.fromkeys(("x", "residual"), torch.randn(2, 3, 8)), **dict.fromkeys(MODULATIONS, torch.randn(8))},
    ),
    "l2": (normforge.l2_norm, PLAIN),
    "rms statistics": (normforge.rms_statistics, rows("x")),
    "layer statistics": (normforge.layer_statistics, rows("x")),
    "module": (normforge.RMSNorm(N), rows("x")),
    "adding module": (normforge.AddRMSNorm(N), BOTH),
    "added module": (
        normforge.RMSNormAdd((4, 16), elementwise_affine=False),
        {name: tensor.view(M, 4, 16) for name, tensor in BOTH.items()},
    ),
}
# A function, and what a good call of the function passes, by what the call has.
CALLS: dict[str, Call] = {
    **FOLLOWED,
    "bare": (normforge.layernorm2d_fwd, rows("x")),
    "plain": (normforge.layernorm2d_fwd, {**rows("x", "out"), **vectors("weight", "bias", "x_bias")}),
    "with a weight": (normforge.rmsnorm2d_fwd, {**rows("x"), **vectors("weight")}),
    "added": (normforge.layernorm2d_fwd, {**rows("x", "residual"), "fadd": 1, "eps": 1.0}),
    "dynamic": (normforge.layernorm2d_fwd, {**rows("x"), "fadd": 0, "fquant": 2, "save_mv": False, "eps": 1.0}),
    "added behind": (normforge.layernorm2d_fwd, {**rows("x", "residual"), "fadd": "post_add"}),
    "fused": (
        normforge.rmsnorm2d_fwd,
        {**rows("x", "residual"), **vectors("weight", "x_bias", "smooth_scale"), **FUSED, **OUTS},
    ),
    "fp8": (normforge.rmsnorm2d_fwd, {**FP8, **vectors("weight")}),
    "dropout": (normforge.layernorm2d_fwd, {**rows("x", "residual"), **vectors("weight", "bias", "x_bias"), **DROPOUT}),
    "backward": (normforge.layernorm2d_bwd, {**backward_operands("layer", M, N), "wants": ("dx", "dweight", "dbias")}),
    "backward, rms": (normforge.rmsnorm2d_bwd, backward_operands("rms", M, N)),
    "backward, l2": (normforge.l2norm2d_bwd, {**rows("dy", "x"), "rstd": torch.ones(M)}),
    "backward, fp8": (normforge.rmsnorm2d_bwd, {**backward_operands("rms", M, N), **FP8_GRADIENT}),
    "quantised": (
        normforge.quantised_layer_norm,
        {**rows("x", "residual"), **vectors("weight", "bias", "smooth_scale"), "fquant": "smooth_dynamic"},
    ),
    "quantised into": (
        normforge.quantised_rms_norm,
        {**rows("x", "residual"), "fquant": "dynamic", **OUTS, "y_scale": SCALES},
    ),
    "quantised, bare": (normforge.quantised_layer_norm, rows("x")),
    "static": (normforge.quantised_rms_norm, {**rows("x"), "fquant": "static", "y_scale": torch.ones(1)}),
    "by columns": (normforge.quantised_rms_norm, {**rows("x"), "fquant": "static", **vectors("y_scale")}),
    "bounded": (normforge.quantised_rms_norm, {**rows("x"), "out_dtype": E4M3, "scale_ub": torch.ones(1)}),
    "MXFP8": (normforge.quantised_layer_norm, {**rows("x"), **MXFP8, "scale_layout": "swizzled_128x4"}),
    "NVFP4": (normforge.quantised_rms_norm, {**rows("x"), **NVFP4}),
    "together": (together, PLAIN),
    "modulated": (
        normforge.modulated_layernorm2d_fwd,
        {**rows("x", "scale", "shift", "gate", "residual"), **vectors("weight"), "fquant": "dynamic", **OUTS},
    ),
    "gated": (normforge.gated_rmsnorm2d_fwd, {**rows("x", "gate"), **vectors("weight"), "fquant": "dynamic"}),
    "renormed": (
        normforge.renormed_rmsnorm2d_fwd,
        {**rows("x", "residual"), **vectors("weight", "next_weight"), "out_dtype": torch.float32},
    ),
}


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose storage is freed, as sharding frees parameters that are not in use."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


# What is wrong with a tensor, the error, and what the message says behind the tensor's name.
WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "a number": (lambda tensor: 2.0, errors.DTypeError, " is (a float|float|2.0); it takes"),
    "False": (lambda tensor: False, errors.DTypeError, " is (a bool|bool|False); it takes"),
    "of integers": (torch.Tensor.int, errors.DTypeError, r" (has dtype|is) .*torch\.int32.*; it takes"),
    "of doubles": (torch.Tensor.double, errors.DTypeError, " (has dtype|is) torch.float64; it takes"),
    "elsewhere": (lambda tensor: tensor.to("meta"), errors.DeviceError, " is on meta and x on cpu; move one to the o"),
    "sparse": (
        lambda tensor: torch.zeros(tensor.shape).to_sparse(),
        errors.LayoutError,
        " is in layout torch.sparse_c",
    ),
    "shorter": (lambda tensor: tensor[:-1], errors.ShapeError, r" has shape \(.*\d+,?\)"),
    "every other": (lambda tensor: torch.stack((tensor,) * 2, -1)[..., 0], errors.LayoutError, " has strides? "),
    "without memory": (without_memory, errors.LayoutError, r" \(.*\) has no memory .*storage was freed"),
    "trained": (lambda tensor: tensor.clone().requires_grad_(), errors.GradientError, " requires a gradient and "),
    "negated": (lambda tensor: torch._neg_view(tensor.clone()), errors.LayoutError, " is a view that negates its mem"),
    "of inference": (HOLDERS["inference"], errors.GradientError, r" is an inference tensor, .*\.clone\(\)$"),
}


def is_written(name: str, tensor: torch.Tensor) -> bool:
    return name in OUTS or tensor is SCALES


# Where such a tensor is all that is wrong with a call, and is refused; everywhere, if nothing is said.
ALONE: dict[str, Callable[[str, torch.Tensor], bool]] = {
    "negated": is_written,
    "of inference": is_written,
    "trained": lambda name, tensor: tensor.is_floating_point(),
    # Beside an x of another shape, or elsewhere, the other tensors are wrong.
    "shorter": lambda name, tensor: name != "x" and tensor.numel() > 1,
    "elsewhere": lambda name, tensor: name != "x",
    "every other": lambda name, tensor: tensor.numel() > 1,
    "sparse": lambda name, tensor: name != "dropout_rng",
}
TAKEN = ("of doubles", "every other", "trained", "negated", "of inference")


def is_refused(call: str, name: str, tensor: Any, wrong: str) -> bool:
    """Whether a call is refused for what is wrong with one of its tensors."""
    if not isinstance(tensor, torch.Tensor) or (call in FOLLOWED and wrong in TAKEN):
        return False
    # GroupNorm does not ask whether its tensors have memory.
    return (call, wrong) != ("group", "without memory") and (wrong not in ALONE or ALONE[wrong](name, tensor))


NAN, TENSOR = math.nan, torch.ones(2)
NUMBER, MODE, DTYPE = "={} will not do; it takes a number", "={} is no mode; it takes", " is {}; it takes"
_NAMES = {"FusedAdd": FusedAdd, "FusedQuant": FusedQuant, **globals()}
VALUES: dict[str, tuple[tuple[Any, ...], str]] = table_at(Path(__file__).with_name("values.yaml"), _NAMES)


def refusal(function: Callable[..., Any], given: dict[str, Any]) -> tuple[type[Exception], str]:
    """Return the error of a call that is refused."""
    # Pytest would print the arguments of this frame, and a tensor without memory cannot be printed.
    __tracebackhide__ = True
    with pytest.raises(errors.NormforgeError) as raised:
        function(**given)
    return type(raised.value), str(raised.value)


# What says beforehand which kernel a function would run.
WHICH = {function: partial(normforge.which, norm=norm) for norm, function in FORWARD.items()}


@pytest.mark.parametrize("call", CALLS)
def test_refused_by_its_name(call: str) -> None:
    function, given = CALLS[call]
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        (given | {name: change(tensor)}, error, name + says)
        for name, tensor in given.items()
        for wrong, (change, error, says) in WRONG.items()
        if is_refused(call, name, tensor, wrong)
    ]
    bad += [
        (
            given | {name: value},
            errors.DTypeError if says.startswith(DTYPE) else errors.ConflictError,
            re.escape(name + says.format(repr(value))),
        )
        for name, (values, says) in VALUES.items()
        for value in values
        # Those of gates: other activations are GroupNorm's.
        if name in inspect.signature(function).parameters and (name != "activation" or "gate" in given)
        # What torch takes: None for RMSNorm's eps, and False for no dropout.
        if call not in FOLLOWED or not (value is None or value is False or value is TENSOR)
    ]
    cold = [refusal(function, wrong) for wrong, _, _ in bad]
    for (found, message), (wrong, error, says) in zip(cold, bad, strict=True):
        assert found is error, message
        assert re.match(says, message), message
        # Which kernel would run does not depend on memory.
        assert "has no memory" in message or refusal(WHICH.get(function, function), wrong) == (found, message)
    for _ in range(2):
        expected = function(**given)
    with torch.no_grad():
        untrained = [function(**wrong) for wrong, error, says in bad if "requires a gradient" in says]
    assert all(same_bits(*pair) for each in untrained for pair in zip(each, expected, strict=True))
    assert [refusal(function, wrong) for wrong, _, _ in bad] == cold
