"""Every way to call wrongly has an error of its own type, which names the argument, what it got and what it takes.

What may be wrong with any tensor of any function is in `test_wrong_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy
import pytest
import torch

import normforge
from normforge import errors
from normforge.codegen.values import FusedAdd, FusedQuant
from normforge.selection import dispatch

from ..calling import FORWARD
from .shared import BACKWARD, backward_operands

X = torch.linspace(-1, 1, 3 * 64).view(3, 64)
N = torch.ones(64)
# Four strides.
PERMUTED = torch.zeros(2, 2, 2, 2, 64).permute(3, 2, 1, 0, 4)
META = torch.zeros(3, 64, device="meta")

INT8 = torch.zeros(3, 64, dtype=torch.int8)
STORE = {"fadd": "pre_add_store", "residual": X.clone()}

# The arguments, the error, and what its message must say; the call is LayerNorm's on x unless said otherwise.
Case = tuple[dict[str, Any], type[Exception], Sequence[str]]

SHAPES: dict[str, tuple[Any, ...]] = {
    "x without dimensions": ({"x": torch.tensor(1.0)}, "x has shape ()", "(..., N)"),
    "x of empty rows": ({"x": torch.zeros(3, 0)}, "x has shape (3, 0)", "N >= 1"),
    "weight too short": ({"weight": N[:63]}, "weight has shape (63,)", "(64,)"),
    "weight of two dimensions": ({"weight": X}, "weight has shape (3, 64)", "(64,)"),
    "residual of one row": ({**STORE, "residual": X[:1]}, "residual has shape (1, 64)", "(3, 64)"),
    "out flattened": ({"out": torch.zeros(192)}, "out has shape (192,)", "(3, 64)"),
    "residual_out too narrow": ({**STORE, "residual_out": X[:, :32]}, "residual_out has shape (3, 32)", "(3, 64)"),
}

DTYPES: dict[str, tuple[Any, ...]] = {
    "x of doubles": ({"x": X.double()}, "x has dtype torch.float64", "torch.float32"),
    "x of integers": ({"x": INT8}, "x has dtype torch.int8", "torch.float16"),
    "bias of integers": ({"bias": N.int()}, "bias has dtype torch.int32", "torch.float32"),
    "out other than out_dtype": (
        {"out": X.half(), "out_dtype": torch.bfloat16},
        "out has dtype torch.float16",
        "bfloat16",
    ),
    "residual_out not residual's": (
        {**STORE, "residual_out": X.half()},
        "residual_out has dtype torch.float16",
        "float32",
    ),
    "out_dtype double": ({"out_dtype": torch.float64}, "out_dtype is torch.float64", "torch.int8"),
    "out_dtype a word": ({"out_dtype": "int8"}, "out_dtype is 'int8'", "torch.int8"),
    "out_dtype False": ({"out_dtype": False}, "out_dtype is False", "torch.int8"),
    "scale_dtype None": ({"scale_dtype": None}, "scale_dtype is None", "torch.float32"),
}

NOT_TENSORS: dict[str, tuple[Any, ...]] = {
    "x a list": ({"x": [1.0, 2.0]}, "x is a list", "torch.Tensor"),
    "x an array": ({"x": numpy.zeros((3, 64))}, "x is a ndarray", "torch.Tensor"),
    "x None": ({"x": None}, "x is a NoneType", "torch.Tensor"),
    "residual a number, quantised": ({**STORE, "residual": 2.0, "fquant": "dynamic"}, "residual is a float", "Tensor"),
    "out a string": ({"out": "y"}, "out is a str", "torch.Tensor"),
    "out a dtype": ({"out": torch.int8, "out_dtype": torch.int8, "fquant": 2}, "out is a dtype"),
}

DEVICES: dict[str, tuple[Any, ...]] = {
    "x on meta": ({"x": META}, "x is on meta", "GPU"),
    "weight elsewhere": ({"weight": N.to("meta")}, "weight is on meta", "x on cpu"),
}

PLANES = f"(shape (2, 2, 2, 2, 64), strides {PERMUTED.stride()})"
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "x transposed": ({"x": torch.zeros(64, 3).T}, "x has stride 3", "x.contiguous()"),
    "x permuted": ({"x": PERMUTED}, f"x {PLANES}", "3 row strides or fewer", "x.contiguous()"),
    "x of some planes' rows": (
        {"x": torch.zeros(3, 3, 3, 3, 64)[:2, :2, :2, :2]},
        "x (shape (2, 2, 2, 2, 64), strides (1728, 576, 192, 64, 1))",
        "x.contiguous()",
    ),
    "bias expanded": ({"bias": N[:1].expand(64)}, "bias has stride 0", "bias.contiguous()"),
    "out transposed planes": ({"x": torch.zeros(PERMUTED.shape), "out": PERMUTED}, f"out {PLANES}"),
}

MODES: dict[str, tuple[Any, ...]] = {
    "residual without fadd": ({"residual": X}, "residual", "fadd 'none'", "'pre_add_store'"),
    "fadd without residual": ({"fadd": "pre_add"}, "fadd 'pre_add'", "pass residual"),
    "fadd 1 without residual": ({"fadd": 1}, "fadd 'pre_add_store'", "pass residual"),
    "residual_out without fadd": ({"residual_out": X}, "residual_out", "fadd 'none'"),
    "residual_out without store": (
        {"residual": X, "fadd": "pre_add", "residual_out": X},
        *("residual_out", "fadd 'pre_add'", "fadd='pre_add_store'"),
    ),
    "smooth_scale without fquant": ({"smooth_scale": N}, "smooth_scale", "fquant 'none'"),
    "smooth_scale with plain fquant": (
        {"smooth_scale": N, "fquant": "dynamic"},
        *("smooth_scale", "fquant 'dynamic'", "fquant='smooth_dynamic'"),
    ),
    "smooth fquant without smooth_scale": (
        {"fquant": "smooth_dynamic"},
        *("fquant 'smooth_dynamic'", "smooth_scale", "fquant='dynamic'"),
    ),
}

ILLEGAL: dict[str, tuple[Any, ...]] = {
    "int8 without fquant": ({"out_dtype": torch.int8}, "out_dtype int8", "fquant"),
    "int8 out without fquant": ({"out": INT8}, "out_dtype int8", "fquant"),
    "fquant into floats": ({"fquant": 2, "out_dtype": torch.float16}, "fquant dynamic", "out_dtype fp16", "int8"),
    "fquant into a float out": ({"fquant": "dynamic", "out": X.clone()}, "fquant dynamic", "out_dtype fp32"),
    "scale_dtype without fquant": ({"scale_dtype": torch.float16}, "scale_dtype fp16", "fquant none"),
    "scale_dtype int8": ({"fquant": 2, "scale_dtype": torch.int8}, "scale_dtype int8", "fp32"),
    "truncate to fp8": (
        {"fquant": 2, "out_dtype": torch.float8_e4m3fn, "rounding": "truncate"},
        *("rounding truncate", "out_dtype is fp8_e4m3fn", "int8"),
    ),
    "truncate without fquant": ({"rounding": "truncate"}, "rounding truncate", "out_dtype is fp32", "int8"),
}

WORDS: dict[str, tuple[Any, ...]] = {
    "fadd unknown": ({"fadd": "add"}, "fadd='add'", "'none' (0)", "'pre_add_store' (1)"),
    "fadd out of range": ({"fadd": 5}, "fadd=5", "'post_add_norm' (4)"),
    "fadd a bool": ({"fadd": True}, "fadd=True", "'pre_add_store' (1)"),
    "fadd False": ({"fadd": False}, "fadd=False", "'none' (0)"),
    "fadd None": ({"fadd": None}, "fadd=None", "'none' (0)"),
    "fadd a float": ({"fadd": 0.0}, "fadd=0.0", "'none' (0)"),
    "fadd a tensor": ({"fadd": N}, "fadd=tensor(", "'none' (0)"),
    "fadd in capitals": ({"fadd": "NONE"}, "fadd='NONE'", "'none' (0)"),
    "fadd of another kind": ({"fadd": FusedQuant.NONE}, "fadd=<FusedQuant.NONE", "'none' (0)"),
    "fquant unknown": ({"fquant": "statical"}, "fquant='statical'", "'dynamic' (2)"),
    "fquant a bool": ({"fquant": True}, "fquant=True", "'smooth_dynamic' (1)"),
    "fquant negative": ({"fquant": -1}, "fquant=-1", "'none' (0)"),
    "fquant of another kind": ({"fquant": FusedAdd.NONE}, "fquant=<FusedAdd.NONE"),
    "rounding unknown": ({"rounding": "up"}, "rounding='up'", "'nearest', 'truncate'"),
    "rounding a number": ({"rounding": 0}, "rounding=0", "'nearest', 'truncate'"),
    "cast unknown": ({"cast": "first"}, "cast='first'", "'after_weight', 'before_weight'"),
    "cast a bool": ({"cast": True}, "cast=True", "'after_weight', 'before_weight'"),
    "save_mv a word": ({"save_mv": "yes"}, "save_mv='yes'", "True or False"),
    "save_mv None": ({"save_mv": None}, "save_mv=None", "True or False"),
    "save_mv 2": ({"save_mv": 2}, "save_mv=2", "True or False"),
}

NUMBERS: dict[str, tuple[Any, ...]] = {
    "eps negative": ({"eps": -1e-5}, "eps=-1e-05", "at least 0"),
    "eps NaN": ({"eps": float("nan")}, "eps=nan", "at least 0"),
    "eps infinite": ({"eps": float("inf")}, "eps=inf", "finite"),
    "eps infinite in fp32": ({"eps": 1e39}, "eps=1e+39", "finite in fp32"),
    "eps beyond any float": ({"eps": 10**400}, "eps=1000", "finite in fp32"),
    "eps a word": ({"eps": "1e-5"}, "eps='1e-5'", "a number"),
    "eps a tensor": ({"eps": N}, "eps=tensor(", "a number"),
    "eps None": ({"eps": None}, "eps=None", "a number"),
    "eps a bool": ({"eps": True}, "eps=True", "a number"),
}

RMS: dict[str, tuple[Any, ...]] = {
    "weight_offset without weight": ({"weight_offset": 1.0}, "weight_offset=1.0", "pass weight"),
    "weight_offset NaN": ({"weight": N, "weight_offset": float("nan")}, "weight_offset=nan"),
    "weight_offset a word": ({"weight": N, "weight_offset": "1"}, "weight_offset='1'", "number"),
    "weight_offset a tensor": ({"weight_offset": N}, "weight_offset=tensor(", "a number"),
    "eps negative": ({"eps": -1}, "eps=-1", "at least 0"),
}


def refused_with(error: type[Exception], rows: dict[str, tuple[Any, ...]]) -> dict[str, Case]:
    return {name: (given, error, says) for name, (given, *says) in rows.items()}


TABLES: dict[str, tuple[str, dict[str, Case]]] = {
    "shape": ("layer", refused_with(errors.ShapeError, SHAPES)),
    "dtype": ("layer", refused_with(errors.DTypeError, DTYPES)),
    "tensor": ("layer", refused_with(errors.DTypeError, NOT_TENSORS)),
    "device": ("layer", refused_with(errors.DeviceError, DEVICES)),
    "layout": ("layer", refused_with(errors.LayoutError, LAYOUTS)),
    "mode": ("layer", refused_with(errors.ConflictError, MODES)),
    "illegal": ("layer", refused_with(errors.IllegalCombinationError, ILLEGAL)),
    "word": ("layer", refused_with(errors.ConflictError, WORDS)),
    "number": ("layer", refused_with(errors.ConflictError, NUMBERS)),
    "rms": ("rms", refused_with(errors.ConflictError, RMS)),
    "rms, shape": ("rms", refused_with(errors.ShapeError, {"weight too short": SHAPES["weight too short"]})),
}
CASES = [
    pytest.param(norm, case, id=f"{table}-{name}".replace(" ", "_"))
    for table, (norm, rows) in TABLES.items()
    for name, case in rows.items()
]


# Calls that leave keys as like as can be to those of the bad ones.
GOOD: tuple[dict[str, Any], ...] = (
    {},
    {"weight": N, "bias": N},
    {"x_bias": N, "out_dtype": torch.float16},
    {**STORE, "residual_out": torch.zeros(3, 64)},
    {"residual": X.clone(), "fadd": 2},
    {"out": torch.zeros(3, 64)},
    {"fquant": "smooth_dynamic", "smooth_scale": N, "save_mv": True},
    {"fquant": 2, "out": torch.zeros(3, 64, dtype=torch.int8), "rounding": "truncate"},
    {"fquant": 2, "out_dtype": torch.float8_e4m3fn, "scale_dtype": torch.float16, "save_mv": 1},
    {"out_dtype": torch.float16, "cast": "before_weight"},
)


@cache
def known_after_good_calls(norm: str) -> dict[Any, Any]:
    """Return the plans of the good calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "plans", {})
        for good in GOOD:
            if norm == "layer" or "bias" not in good:
                FORWARD[norm](X, **good)
        return dispatch.plans


def refusal(function: Callable[[], object]) -> tuple[type[Exception], str]:
    """Return the error of a call that is refused."""
    with pytest.raises(errors.NormforgeError) as raised:
        function()
    return type(raised.value), str(raised.value)


@pytest.mark.parametrize(("norm", "case"), CASES)
def test_refused(norm: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike where nothing is known, by `which`, and after good calls."""
    arguments, error, says = case
    call = {"x": X, **arguments}
    monkeypatch.setattr(dispatch, "plans", {})
    cold = refusal(lambda: FORWARD[norm](**call))
    assert cold[0] is error
    for words in says:
        assert words in cold[1]
    assert refusal(lambda: normforge.which(**call, norm=norm)) == cold
    monkeypatch.setattr(dispatch, "plans", known_after_good_calls(norm))
    assert refusal(lambda: FORWARD[norm](**call)) == cold


# The arguments of a backward call of LayerNorm's that are other than usual, the error, and how its message begins.
BAD_GRADIENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no mean": ({"mean": None}, errors.DTypeError, "mean is NoneType; it takes the torch.float32 tensor that the forw"),
    "wants unknown": ({"wants": ("dx", "dy")}, errors.ConflictError, "wants has 'dy'; it takes some of dx, dweight"),
    "wants of nothing": ({"weight": None}, errors.ConflictError, "wants has 'dweight' and no weight was passed"),
    "wants a word": ({"wants": "dx"}, errors.ConflictError, "wants has 'd'; it takes some of dx, dweight"),
    "dx_dtype of integers": ({"dx_dtype": torch.int8}, errors.DTypeError, "dx_dtype is torch.int8"),
    "bias_dtype of doubles": ({"bias_dtype": torch.float64}, errors.DTypeError, "bias_dtype is torch.float64"),
    "x of fp8": (
        {"x": X.to(torch.float8_e4m3fn)},
        errors.DTypeError,
        "x has dtype torch.float8_e4m3fn, which has no gradient",
    ),
    "no dropout_rng": (
        {"dropout_p": 0.5},
        errors.ConflictError,
        "dropout_p=0.5 dropped elements by a dropout_rng and none was passed",
    ),
    "a generator": (
        {"dropout_p": 0.5, "dropout_rng": torch.Generator()},
        errors.ConflictError,
        "dropout_p=0.5 dropped elements by a dropout_rng and none was passed",
    ),
    "nothing dropped": (
        {"wants": ("ddropped",)},
        errors.ConflictError,
        "wants has 'ddropped' and no dropout_p was passed",
    ),
}
RMS_BAD_GRADIENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "weight_offset without weight": (
        {"weight": None, "weight_offset": 1.0, "wants": ("dx",)},
        errors.ConflictError,
        "weight_offset=1.0 is added to weight and none was passed",
    ),
    **{
        f"weight_offset {offset}": (
            {"weight_offset": offset},
            errors.ConflictError,
            f"weight_offset={offset!r} will not do; it takes a number that is finite",
        )
        for offset in (float("nan"), float("inf"), 1e39, "1", True)
    },
}


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize(
    ("norm", "bad", "error", "says"),
    [
        *(pytest.param("layer", *row, id=name) for name, row in BAD_GRADIENTS.items()),
        *(pytest.param("rms", *row, id=name) for name, row in RMS_BAD_GRADIENTS.items()),
    ],
)
def test_a_backward_call_is_refused(norm: str, bad: dict[str, Any], error: type[Exception], says: str) -> None:
    """Alike where nothing is known and after good calls."""
    given = {**backward_operands(norm), "wants": ("dx", "dweight")}
    cold = refusal(lambda: BACKWARD[norm](**given | bad))
    assert cold[0] is error
    assert cold[1].startswith(says)
    for wants in (("dx", "dweight"), ("dx",)):
        BACKWARD[norm](**given | {"wants": wants})
    assert refusal(lambda: BACKWARD[norm](**given | bad)) == cold


def test_norm_unknown() -> None:
    with pytest.raises(errors.ConflictError, match=r"norm='batch' is no mode; it takes 'layer', 'rms'"):
        normforge.which(X, norm="batch")


def test_errors_are_also_what_python_would_raise() -> None:
    also = {
        errors.ShapeError: ValueError,
        errors.DTypeError: TypeError,
        errors.DeviceError: RuntimeError,
        errors.LayoutError: ValueError,
        errors.ConflictError: ValueError,
    }
    assert all(issubclass(error, usual) and issubclass(error, errors.ArgumentError) for error, usual in also.items())
