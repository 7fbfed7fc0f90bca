"""Every way to call wrongly has an error of its own type, which names the argument, what it got and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import normforge
from normforge import errors
from normforge.codegen.values import FusedAdd, FusedQuant

from ..calling import FORWARD, same_bits

X = torch.linspace(-1, 1, 3 * 64).view(3, 64)
N = torch.ones(64)
WIDE = torch.zeros(3, 128)
# Four strides.
PERMUTED = torch.zeros(2, 2, 2, 2, 64).permute(3, 2, 1, 0, 4)
META = torch.zeros(3, 64, device="meta")

INT8 = torch.zeros(3, 64, dtype=torch.int8)
SMOOTH = {"fquant": "smooth_dynamic", "smooth_scale": N}
STORE = {"fadd": "pre_add_store", "residual": X.clone()}

# The arguments, the error, and what its message must say; the call is LayerNorm's on x unless said otherwise.
Case = tuple[dict[str, Any], type[Exception], tuple[str, ...]]

SHAPES: dict[str, Case] = {
    "x without dimensions": ({"x": torch.tensor(1.0)}, errors.ShapeError, ("x has shape ()", "(..., N)")),
    "x of empty rows": ({"x": torch.zeros(3, 0)}, errors.ShapeError, ("x has shape (3, 0)", "N >= 1")),
    "weight too short": ({"weight": N[:63]}, errors.ShapeError, ("weight has shape (63,)", "(64,)")),
    "weight of two dimensions": ({"weight": X}, errors.ShapeError, ("weight has shape (3, 64)", "(64,)")),
    "bias too long": ({"bias": torch.ones(65)}, errors.ShapeError, ("bias has shape (65,)", "(64,)")),
    "x_bias of one element": ({"x_bias": N[:1]}, errors.ShapeError, ("x_bias has shape (1,)", "(64,)")),
    "smooth_scale a row": ({**SMOOTH, "smooth_scale": N[:3]}, errors.ShapeError, ("smooth_scale has shape (3,)",)),
    "residual of one row": ({**STORE, "residual": X[:1]}, errors.ShapeError, ("residual has shape (1, 64)", "(3, 64)")),
    "out of one row less": ({"out": torch.zeros(2, 64)}, errors.ShapeError, ("out has shape (2, 64)", "(3, 64)")),
    "out flattened": ({"out": torch.zeros(192)}, errors.ShapeError, ("out has shape (192,)", "(3, 64)")),
    "residual_out too narrow": (
        {**STORE, "residual_out": torch.zeros(3, 32)},
        errors.ShapeError,
        ("residual_out has shape (3, 32)", "(3, 64)"),
    ),
}

DTYPES: dict[str, Case] = {
    "x of doubles": ({"x": X.double()}, errors.DTypeError, ("x has dtype torch.float64", "torch.float32")),
    "x of integers": ({"x": INT8}, errors.DTypeError, ("x has dtype torch.int8", "torch.float16")),
    "weight of doubles": (
        {"weight": N.double()},
        errors.DTypeError,
        ("weight has dtype torch.float64", "torch.bfloat16"),
    ),
    "bias of integers": ({"bias": N.int()}, errors.DTypeError, ("bias has dtype torch.int32", "torch.float32")),
    "x_bias of doubles": ({"x_bias": N.double()}, errors.DTypeError, ("x_bias has dtype torch.float64",)),
    "smooth_scale of doubles": (
        {**SMOOTH, "smooth_scale": N.double()},
        errors.DTypeError,
        ("smooth_scale has dtype torch.float64",),
    ),
    "residual of doubles": (
        {**STORE, "residual": X.double()},
        errors.DTypeError,
        ("residual has dtype torch.float64",),
    ),
    "out of doubles": ({"out": X.double()}, errors.DTypeError, ("out has dtype torch.float64", "torch.float32")),
    "out other than out_dtype": (
        {"out": X.half(), "out_dtype": torch.bfloat16},
        errors.DTypeError,
        ("out has dtype torch.float16", "torch.bfloat16"),
    ),
    "residual_out not residual's": (
        {**STORE, "residual_out": X.half()},
        errors.DTypeError,
        ("residual_out has dtype torch.float16", "torch.float32"),
    ),
    "out_dtype double": ({"out_dtype": torch.float64}, errors.DTypeError, ("out_dtype is torch.float64", "torch.int8")),
    "out_dtype a word": ({"out_dtype": "int8"}, errors.DTypeError, ("out_dtype is 'int8'", "torch.int8")),
    "out_dtype False": ({"out_dtype": False}, errors.DTypeError, ("out_dtype is False", "torch.int8")),
    "scale_dtype None": ({"scale_dtype": None}, errors.DTypeError, ("scale_dtype is None", "torch.float32")),
}

NOT_TENSORS: dict[str, Case] = {
    "x a list": ({"x": [1.0, 2.0]}, errors.DTypeError, ("x is a list", "torch.Tensor")),
    "x an array": ({"x": numpy.zeros((3, 64))}, errors.DTypeError, ("x is a ndarray", "torch.Tensor")),
    "x None": ({"x": None}, errors.DTypeError, ("x is a NoneType", "torch.Tensor")),
    "weight a number": ({"weight": 2.0}, errors.DTypeError, ("weight is a float", "torch.Tensor")),
    "bias False": ({"bias": False}, errors.DTypeError, ("bias is a bool", "torch.Tensor")),
    "x_bias a number": ({"x_bias": 1}, errors.DTypeError, ("x_bias is a int", "torch.Tensor")),
    "smooth_scale a number": ({**SMOOTH, "smooth_scale": 0.5}, errors.DTypeError, ("smooth_scale is a float",)),
    "residual a list": ({**STORE, "residual": [1.0]}, errors.DTypeError, ("residual is a list", "torch.Tensor")),
    "residual a number, quantised": (
        {**STORE, "residual": 2.0, "fquant": "dynamic"},
        errors.DTypeError,
        ("residual is a float", "torch.Tensor"),
    ),
    "out a string": ({"out": "y"}, errors.DTypeError, ("out is a str", "torch.Tensor")),
    "out a dtype": ({"out": torch.int8, "out_dtype": torch.int8, "fquant": 2}, errors.DTypeError, ("out is a dtype",)),
    "residual_out True": ({**STORE, "residual_out": True}, errors.DTypeError, ("residual_out is a bool",)),
}

DEVICES: dict[str, Case] = {
    "x on meta": ({"x": META}, errors.DeviceError, ("x is on meta", "GPU")),
    "weight elsewhere": ({"weight": META[0]}, errors.DeviceError, ("weight is on meta", "x on cpu")),
    "bias elsewhere": ({"bias": META[0]}, errors.DeviceError, ("bias is on meta", "x on cpu")),
    "x_bias elsewhere": ({"x_bias": META[0]}, errors.DeviceError, ("x_bias is on meta", "x on cpu")),
    "smooth_scale elsewhere": ({**SMOOTH, "smooth_scale": META[0]}, errors.DeviceError, ("smooth_scale is on meta",)),
    "residual elsewhere": ({**STORE, "residual": META}, errors.DeviceError, ("residual is on meta", "x on cpu")),
    "out elsewhere": ({"out": META}, errors.DeviceError, ("out is on meta", "x on cpu")),
    "residual_out elsewhere": ({**STORE, "residual_out": META}, errors.DeviceError, ("residual_out is on meta",)),
}

LAYOUTS: dict[str, Case] = {
    "x transposed": ({"x": torch.zeros(64, 3).T}, errors.LayoutError, ("x has stride 3", "x.contiguous()")),
    "x of every other column": ({"x": WIDE[:, ::2]}, errors.LayoutError, ("x has stride 2", "x.contiguous()")),
    "x permuted": (
        {"x": PERMUTED},
        errors.LayoutError,
        (f"x (shape (2, 2, 2, 2, 64), strides {PERMUTED.stride()})", "3 row strides or fewer", "x.contiguous()"),
    ),
    "x of some planes' rows": (
        {"x": torch.zeros(3, 3, 3, 3, 64)[:2, :2, :2, :2]},
        errors.LayoutError,
        ("x (shape (2, 2, 2, 2, 64), strides (1728, 576, 192, 64, 1))", "x.contiguous()"),
    ),
    "x sparse": ({"x": X.to_sparse()}, errors.LayoutError, ("x is in layout torch.sparse_coo", "dense")),
    "weight of every other element": (
        {"weight": torch.ones(128)[::2]},
        errors.LayoutError,
        ("weight has stride 2", "weight.contiguous()"),
    ),
    "bias expanded": ({"bias": N[:1].expand(64)}, errors.LayoutError, ("bias has stride 0", "bias.contiguous()")),
    "residual of every other column": (
        {**STORE, "residual": WIDE[:, ::2]},
        errors.LayoutError,
        ("residual has stride 2", "residual.contiguous()"),
    ),
    "out of every other column": ({"out": WIDE[:, ::2]}, errors.LayoutError, ("out has stride 2",)),
    "out transposed planes": (
        {"x": torch.zeros(PERMUTED.shape), "out": PERMUTED},
        errors.LayoutError,
        (f"out (shape (2, 2, 2, 2, 64), strides {PERMUTED.stride()})",),
    ),
    "residual_out of every other column": (
        {**STORE, "residual_out": WIDE[:, ::2]},
        errors.LayoutError,
        ("residual_out has stride 2",),
    ),
}

MODES: dict[str, Case] = {
    "residual without fadd": ({"residual": X}, errors.ConflictError, ("residual", "fadd 'none'", "'pre_add_store'")),
    "fadd without residual": ({"fadd": "pre_add"}, errors.ConflictError, ("fadd 'pre_add'", "pass residual")),
    "fadd 1 without residual": ({"fadd": 1}, errors.ConflictError, ("fadd 'pre_add_store'", "pass residual")),
    "residual_out without fadd": ({"residual_out": X}, errors.ConflictError, ("residual_out", "fadd 'none'")),
    "residual_out without store": (
        {"residual": X, "fadd": "pre_add", "residual_out": X},
        errors.ConflictError,
        ("residual_out", "fadd 'pre_add'", "fadd='pre_add_store'"),
    ),
    "smooth_scale without fquant": ({"smooth_scale": N}, errors.ConflictError, ("smooth_scale", "fquant 'none'")),
    "smooth_scale with plain fquant": (
        {"smooth_scale": N, "fquant": "dynamic"},
        errors.ConflictError,
        ("smooth_scale", "fquant 'dynamic'", "fquant='smooth_dynamic'"),
    ),
    "smooth fquant without smooth_scale": (
        {"fquant": "smooth_dynamic"},
        errors.ConflictError,
        ("fquant 'smooth_dynamic'", "smooth_scale", "fquant='dynamic'"),
    ),
    "int8 without fquant": ({"out_dtype": torch.int8}, errors.IllegalCombinationError, ("out_dtype int8", "fquant")),
    "int8 out without fquant": ({"out": INT8}, errors.IllegalCombinationError, ("out_dtype int8", "fquant")),
    "fquant into floats": (
        {"fquant": "dynamic", "out_dtype": torch.float16},
        errors.IllegalCombinationError,
        ("fquant dynamic", "out_dtype fp16", "int8"),
    ),
    "fquant into a float out": (
        {"fquant": "dynamic", "out": X.clone()},
        errors.IllegalCombinationError,
        ("fquant dynamic", "out_dtype fp32"),
    ),
    "scale_dtype without fquant": (
        {"scale_dtype": torch.float16},
        errors.IllegalCombinationError,
        ("scale_dtype fp16", "fquant none"),
    ),
    "scale_dtype int8": (
        {"fquant": 2, "scale_dtype": torch.int8},
        errors.IllegalCombinationError,
        ("scale_dtype int8", "fp32"),
    ),
    "truncate to fp8": (
        {"fquant": 2, "out_dtype": torch.float8_e4m3fn, "rounding": "truncate"},
        errors.IllegalCombinationError,
        ("rounding truncate", "out_dtype is fp8_e4m3fn", "int8"),
    ),
    "truncate without fquant": (
        {"rounding": "truncate"},
        errors.IllegalCombinationError,
        ("rounding truncate", "out_dtype is fp32", "int8"),
    ),
}

WORDS: dict[str, Case] = {
    "fadd unknown": ({"fadd": "add"}, errors.ConflictError, ("fadd='add'", "'none' (0)", "'pre_add_store' (1)")),
    "fadd out of range": ({"fadd": 3}, errors.ConflictError, ("fadd=3", "'pre_add' (2)")),
    "fadd a bool": ({"fadd": True}, errors.ConflictError, ("fadd=True", "'pre_add_store' (1)")),
    "fadd False": ({"fadd": False}, errors.ConflictError, ("fadd=False", "'none' (0)")),
    "fadd None": ({"fadd": None}, errors.ConflictError, ("fadd=None", "'none' (0)")),
    "fadd a float": ({"fadd": 0.0}, errors.ConflictError, ("fadd=0.0", "'none' (0)")),
    "fadd a tensor": ({"fadd": N}, errors.ConflictError, ("fadd=tensor(", "'none' (0)")),
    "fadd in capitals": ({"fadd": "NONE"}, errors.ConflictError, ("fadd='NONE'", "'none' (0)")),
    "fadd of another kind": ({"fadd": FusedQuant.NONE}, errors.ConflictError, ("fadd=<FusedQuant.NONE", "'none' (0)")),
    "fquant unknown": ({"fquant": "statical"}, errors.ConflictError, ("fquant='statical'", "'dynamic' (2)")),
    "fquant a bool": ({"fquant": True}, errors.ConflictError, ("fquant=True", "'smooth_dynamic' (1)")),
    "fquant negative": ({"fquant": -1}, errors.ConflictError, ("fquant=-1", "'none' (0)")),
    "fquant of another kind": ({"fquant": FusedAdd.NONE}, errors.ConflictError, ("fquant=<FusedAdd.NONE",)),
    "rounding unknown": ({"rounding": "up"}, errors.ConflictError, ("rounding='up'", "'nearest', 'truncate'")),
    "rounding a number": ({"rounding": 0}, errors.ConflictError, ("rounding=0", "'nearest', 'truncate'")),
    "cast unknown": ({"cast": "first"}, errors.ConflictError, ("cast='first'", "'after_weight', 'before_weight'")),
    "cast a bool": ({"cast": True}, errors.ConflictError, ("cast=True", "'after_weight', 'before_weight'")),
    "save_mv a word": ({"save_mv": "yes"}, errors.ConflictError, ("save_mv='yes'", "True or False")),
    "save_mv None": ({"save_mv": None}, errors.ConflictError, ("save_mv=None", "True or False")),
    "save_mv 2": ({"save_mv": 2}, errors.ConflictError, ("save_mv=2", "True or False")),
}

NUMBERS: dict[str, Case] = {
    "eps negative": ({"eps": -1e-5}, errors.ConflictError, ("eps=-1e-05", "at least 0")),
    "eps NaN": ({"eps": float("nan")}, errors.ConflictError, ("eps=nan", "at least 0")),
    "eps infinite": ({"eps": float("inf")}, errors.ConflictError, ("eps=inf", "finite")),
    "eps infinite in fp32": ({"eps": 1e39}, errors.ConflictError, ("eps=1e+39", "finite in fp32")),
    "eps beyond any float": ({"eps": 10**400}, errors.ConflictError, ("eps=1000", "finite in fp32")),
    "eps a word": ({"eps": "1e-5"}, errors.ConflictError, ("eps='1e-5'", "a number")),
    "eps a tensor": ({"eps": N}, errors.ConflictError, ("eps=tensor(", "a number")),
    "eps None": ({"eps": None}, errors.ConflictError, ("eps=None", "a number")),
    "eps a bool": ({"eps": True}, errors.ConflictError, ("eps=True", "a number")),
}

RMS: dict[str, Case] = {
    "weight_offset without weight": (
        {"weight_offset": 1.0},
        errors.ConflictError,
        ("weight_offset=1.0", "pass weight"),
    ),
    "weight_offset NaN": ({"weight": N, "weight_offset": float("nan")}, errors.ConflictError, ("weight_offset=nan",)),
    "weight_offset a word": (
        {"weight": N, "weight_offset": "1"},
        errors.ConflictError,
        ("weight_offset='1'", "number"),
    ),
    "weight_offset a tensor": ({"weight_offset": N}, errors.ConflictError, ("weight_offset=tensor(", "a number")),
    "weight too short": ({"weight": N[:5]}, errors.ShapeError, ("weight has shape (5,)", "(64,)")),
    "eps negative": ({"eps": -1}, errors.ConflictError, ("eps=-1", "at least 0")),
}

TABLES = {
    "shape": ("layer", SHAPES),
    "dtype": ("layer", DTYPES),
    "tensor": ("layer", NOT_TENSORS),
    "device": ("layer", DEVICES),
    "layout": ("layer", LAYOUTS),
    "mode": ("layer", MODES),
    "word": ("layer", WORDS),
    "number": ("layer", NUMBERS),
    "rms": ("rms", RMS),
}


@pytest.mark.parametrize(
    ("norm", "case"),
    [
        pytest.param(norm, case, id=f"{table}-{name}".replace(" ", "_"))
        for table, (norm, cases) in TABLES.items()
        for name, case in cases.items()
    ],
)
def test_refused(norm: str, case: Case) -> None:
    arguments, error, says = case
    call = {"x": X, **arguments}
    functions: tuple[Callable[[], object], ...] = (
        lambda: FORWARD[norm](**call),
        lambda: normforge.which(**call, norm=norm),
    )
    for function in functions:
        with pytest.raises(errors.NormforgeError) as raised:
            function()
        assert type(raised.value) is error
        for words in says:
            assert words in str(raised.value)


def test_norm_unknown() -> None:
    with pytest.raises(errors.ConflictError, match=r"norm='batch' is no mode; it takes 'layer', 'rms'"):
        normforge.which(X, norm="batch")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"x": torch.zeros(3, 0)}, ValueError),
        ({"x": INT8}, TypeError),
        ({"x": META}, RuntimeError),
        ({"x": WIDE[:, ::2]}, ValueError),
        ({"x": X, "fadd": "add"}, ValueError),
    ],
    ids=["shape", "dtype", "device", "layout", "word"],
)
def test_errors_are_also_what_python_would_raise(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        FORWARD["layer"](**arguments)
    assert isinstance(raised.value, errors.ArgumentError)


def test_a_refused_call_writes_nothing() -> None:
    out, residual_out = torch.full((3, 64), 7.0), torch.full((3, 64), 8.0)
    with pytest.raises(errors.ShapeError):
        FORWARD["layer"](X, N[:5], out=out, residual=X, fadd=1, residual_out=residual_out)
    assert same_bits(out, torch.full((3, 64), 7.0))
    assert same_bits(residual_out, torch.full((3, 64), 8.0))
