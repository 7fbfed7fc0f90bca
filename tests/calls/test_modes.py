"""The ways to say a mode, and what each returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from normforge import LayerNormOutput
from normforge.codegen.values import Cast, FusedAdd, FusedQuant, Norm, Rounding

from ..calling import FORWARD, each_norm, same_bits

M, N = 3, 100


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(M, N, dtype=torch.float16)


def assert_same(outputs: list[LayerNormOutput]) -> None:
    """Fail unless all outputs are equal to the bit."""
    for output in outputs[1:]:
        for a, b in zip(outputs[0], output, strict=True):
            assert same_bits(a, b)


@each_norm
@pytest.mark.parametrize("mode", FusedAdd)
def test_fadd_as_word_integer_and_enum(norm: str, mode: FusedAdd, x: torch.Tensor) -> None:
    extra: dict[str, Any] = {"residual": torch.randn(M, N)} if mode.adds else {}
    spellings = (mode, mode.value, mode.code)
    assert_same([FORWARD[norm](x, fadd=spelling, **extra) for spelling in spellings])
    assert len({normforge.which(x, fadd=spelling, **extra, norm=norm) for spelling in spellings}) == 1


@each_norm
# Scales that are given are those of `quantised_layer_norm`.
@pytest.mark.parametrize("mode", [mode for mode in FusedQuant if not mode.is_static])
def test_fquant_as_word_integer_and_enum(norm: str, mode: FusedQuant, x: torch.Tensor) -> None:
    extra: dict[str, Any] = {"smooth_scale": torch.randn(N)} if mode.smooths else {}
    spellings = (mode, mode.value, mode.code)
    assert_same([FORWARD[norm](x, fquant=spelling, **extra) for spelling in spellings])
    assert len({normforge.which(x, fquant=spelling, **extra, norm=norm) for spelling in spellings}) == 1


def test_codes_are_those_of_ck_tile() -> None:
    assert [mode.code for mode in (FusedAdd.NONE, FusedAdd.PRE_ADD_STORE, FusedAdd.PRE_ADD)] == [0, 1, 2]
    assert [mode.code for mode in (FusedQuant.NONE, FusedQuant.SMOOTH_DYNAMIC, FusedQuant.DYNAMIC)] == [0, 1, 2]


def test_rounding_as_word_and_enum(x: torch.Tensor) -> None:
    assert_same([FORWARD["layer"](x, fquant=2, rounding=spelling) for spelling in ("truncate", Rounding.TRUNCATE)])


def test_cast_as_word_and_enum(x: torch.Tensor) -> None:
    spellings = ("before_weight", Cast.BEFORE_WEIGHT)
    assert_same([FORWARD["rms"](x.bfloat16(), cast=spelling) for spelling in spellings])


@pytest.mark.parametrize("flag", [1, 0])
def test_save_mv_as_integer(flag: int, x: torch.Tensor) -> None:
    assert_same([FORWARD["layer"](x, save_mv=spelling) for spelling in (flag, bool(flag))])


def test_norm_as_word_and_enum(x: torch.Tensor) -> None:
    assert normforge.which(x, norm="rms") == normforge.which(x, norm=Norm.RMS) != normforge.which(x)


ASKED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "bare": ({}, set()),
    "pre_add": ({"fadd": "pre_add"}, set()),
    "pre_add_store": ({"fadd": "pre_add_store"}, {"residual_out"}),
    "dynamic": ({"fquant": "dynamic"}, {"y_scale"}),
    "save_mv": ({"save_mv": True}, {"mean", "rstd"}),
    "all": ({"fadd": 1, "fquant": 2, "save_mv": True}, {"residual_out", "y_scale", "mean", "rstd"}),
}


@pytest.mark.parametrize(("keywords", "returned"), ASKED.values(), ids=ASKED)
@each_norm
def test_what_was_not_asked_is_none(norm: str, keywords: dict[str, Any], returned: set[str], x: torch.Tensor) -> None:
    if "fadd" in keywords:
        keywords = keywords | {"residual": torch.randn(M, N)}
    actual = FORWARD[norm](x, **keywords)
    there = {name for name, tensor in actual._asdict().items() if tensor is not None}
    assert there == {"y"} | (returned if norm == "layer" else returned - {"mean"})


def test_output_dtypes(x: torch.Tensor) -> None:
    residual = torch.randn(M, N, dtype=torch.bfloat16)
    actual = FORWARD["layer"](x, residual=residual, fadd=1, fquant=2, scale_dtype=torch.float16, save_mv=True)
    dtypes = [tensor.dtype for tensor in actual if tensor is not None]
    assert dtypes == [torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float32]
    assert FORWARD["layer"](x).y.dtype == torch.float16
    assert FORWARD["layer"](x, out_dtype=torch.float32).y.dtype == torch.float32
