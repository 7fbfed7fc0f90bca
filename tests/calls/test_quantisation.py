"""Quantised rows: their scale, their rounding, and the ends of their range."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from normforge.dtypes import DTYPES

from ..calling import FORWARD, ORACLE, QUANTISED, check, each_norm, each_pipeline, each_quantised, there

# Numpy, which interprets kernels, remarks on the NaN, infinities and divisions by zero that are tested here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

SCALES = (torch.float16, torch.bfloat16, torch.float32)


def qmax(dtype: torch.dtype) -> float:
    """The largest value of a quantised type, from torch."""
    return 127.0 if dtype == torch.int8 else float(torch.finfo(dtype).max)


def test_qmax_is_the_largest_value_of_the_type() -> None:
    assert {dtype: DTYPES[dtype].qmax for dtype in QUANTISED} == {dtype: qmax(dtype) for dtype in QUANTISED}


@pytest.mark.parametrize("bare", [True, False])
@each_norm
@each_pipeline
def test_what_lies_beyond_the_row_has_no_part_in_its_amax(n: int, norm: str, bare: bool) -> None:
    """Lanes past the end hold zeros, which are far from the mean of these rows."""
    weight = None if bare else torch.rand(n) + 0.5
    check(norm, 1000 + torch.randn(3, n), weight, x_bias=torch.randn(n), fquant="dynamic", out_dtype=torch.int8)


# fp16's smallest number: what it holds below 2**-14 is a multiple of it.
STEP = 2.0**-24


@pytest.mark.parametrize("steps", [1e-9, 0.3, 0.5, 1.4, 2.5, 700.2])
@each_pipeline
@each_quantised
def test_a_scale_that_fp16_holds_as_a_subnormal_cuts_nothing_off(n: int, dtype: torch.dtype, steps: float) -> None:
    """To nearest, 0.3 steps would be no scale at all, and 1.4 steps one by which amax comes out at 1.4 qmax."""
    x = torch.randn(1, n)
    weight = torch.full((n,), steps * STEP * qmax(dtype) / float(ORACLE["layer"](x).z.abs().amax()))
    actual: Any = check("layer", x, weight, fquant="dynamic", out_dtype=dtype, scale_dtype=torch.float16)
    assert actual.y_scale.item() == math.ceil(steps) * STEP
    z = ORACLE["layer"](x, weight).z
    back = actual.y.double() * actual.y_scale.item()
    # Half a step of int8, and of fp8's subnormals; half a last place of fp8's normal values.
    smallest = 1.0 if dtype == torch.int8 else torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    places = 0.0 if dtype == torch.int8 else 0.5 * torch.finfo(dtype).eps
    allowed = torch.maximum(0.5 * smallest * actual.y_scale.double(), places * z.abs())
    assert ((back - z).abs() <= 1.001 * allowed).all()


@each_pipeline
@each_quantised
def test_scales_that_overflow_are_seen(n: int, dtype: torch.dtype) -> None:
    """fp16 ends at 65504: a row whose scale is beyond that cannot be told apart from an infinite one, and is not 0."""
    x, weight = torch.randn(2, n), torch.full((n,), 1e5 * qmax(dtype))
    keywords: dict[str, Any] = {"out_dtype": dtype, "fquant": "dynamic"}
    actual = FORWARD["layer"](x, weight, scale_dtype=torch.float16, **keywords)
    assert there(actual.y_scale).tolist() == [torch.inf, torch.inf]
    # fp32 and bf16 hold it.
    for scale_dtype in SCALES[1:]:
        check("layer", x, weight, scale_dtype=scale_dtype, **keywords)


@pytest.mark.parametrize("scale_dtype", SCALES, ids=str)
@each_pipeline
@each_quantised
def test_the_largest_value_of_a_row_is_the_largest_of_the_type(
    n: int, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    """A scale that its type rounds down makes more than qmax of amax; in int8 that once wrapped to -128 elsewhere."""
    x = torch.randn(6 if n > 2000 else 40, n)
    actual = check("layer", x, fquant="dynamic", out_dtype=dtype, scale_dtype=scale_dtype)
    z = ORACLE["layer"](x).z
    largest = actual.y.double().gather(1, z.abs().argmax(1, keepdim=True))
    assert torch.equal(largest, qmax(dtype) * z.gather(1, z.abs().argmax(1, keepdim=True)).sign())


def test_truncation_is_that_of_an_exact_quotient() -> None:
    """ck_tile's (z / y_scale) to int8; z times an inverse is 126.99999 in rows where the quotient is 127.

    The RMSNorm of ones with eps 0 is exactly its weight.
    """
    ends = torch.tensor([127.0, 126.999, 1.999, 1.0, 0.999, 0.5, 0.0])
    for z in (torch.cat((ends, -ends)), *torch.randn(100, 64)):
        actual: Any = FORWARD["rms"](torch.ones(1, len(z)), z, eps=0.0, fquant="dynamic", rounding="truncate")
        assert actual.y_scale.item() == (z.abs().max() / 127).item()
        assert actual.y[0].tolist() == [int(value) for value in (z / actual.y_scale).tolist()]


def test_int8_ties_go_to_even() -> None:
    halves = torch.arange(-127, 127) + 0.5
    up, down = torch.nextafter(halves, halves + 1), torch.nextafter(halves, halves - 1)
    values = torch.cat((torch.tensor([127.0]), halves, up, down))
    actual = FORWARD["rms"](torch.ones(1, len(values)), values, eps=0.0, fquant="dynamic")
    assert there(actual.y_scale).tolist() == [1.0]
    assert actual.y[0].tolist() == [round(value) for value in values.tolist()]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_scale_that_fp32_cannot_invert_is_no_scale(dtype: torch.dtype) -> None:
    """Amax of about 1e-37 leaves a subnormal scale, whose inverse is infinite."""
    x = torch.randn(3, 64)
    actual = FORWARD["layer"](x, torch.full((64,), 1e-37), fquant="dynamic", out_dtype=dtype)
    assert torch.equal(there(actual.y_scale), torch.ones(3))
    assert not actual.y.float().any()
