"""The software fp8 encoders against torch's casts, bit by bit."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

# Untyped, as everything generated.
primitives = import_module("normforge.generated.primitives")

BLOCK = 1 << 13
ENCODERS = {
    torch.float8_e4m3fn: primitives.to_fp8_e4m3fn,
    torch.float8_e4m3fnuz: primitives.to_fp8_e4m3fnuz,
    torch.float8_e5m2: primitives.to_fp8_e5m2,
}
ENCODE_FP4 = primitives.to_fp4_e2m1fn
each_format = pytest.mark.parametrize("dtype", ENCODERS, ids=str)


def _encode(values_ptr: Any, codes_ptr: Any, COUNT: Any, ENCODE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < COUNT
    values = tl.load(values_ptr + offsets, mask=mask, other=0.0)
    tl.store(codes_ptr + offsets, ENCODE(values, tl.uint8), mask=mask)


encode_kernel: Any = triton.jit(_encode)


def _encode_fp4(values_ptr: Any, codes_ptr: Any, COUNT: Any, BLOCK: tl.constexpr) -> None:
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < COUNT
    codes = ENCODE_FP4(tl.load(values_ptr + offsets, mask=mask, other=0.0))
    tl.store(codes_ptr + offsets, codes.to(tl.uint8), mask=mask)


encode_fp4_kernel: Any = triton.jit(_encode_fp4)


def encode(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The codes that the emitted encoder gives fp32 values."""
    codes = torch.full(values.shape, 0xAA, dtype=torch.uint8)
    grid = (triton.cdiv(len(values), BLOCK),)
    encode_kernel[grid](values, codes, len(values), ENCODERS[dtype], BLOCK)
    return codes


def largest(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max)


def assert_encoded_as_torch_casts(values: torch.Tensor, dtype: torch.dtype) -> None:
    """Fail unless every code is that of torch's cast of the value, saturated."""
    expected = values.clamp(-largest(dtype), largest(dtype)).to(dtype).view(torch.uint8)
    codes = encode(values, dtype)
    wrong = codes != expected
    assert not wrong.any(), list(zip(values[wrong][:5].tolist(), codes[wrong][:5].tolist(), strict=True))


def representable(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of a format that is not negative, ascending, as fp32."""
    values = torch.arange(256).to(torch.uint8).view(dtype).float()
    return values[values.isfinite() & ~values.signbit()].sort().values


@each_format
def test_every_fp16_value(dtype: torch.dtype) -> None:
    values = torch.arange(1 << 16).to(torch.uint16).view(torch.float16).float()
    assert_encoded_as_torch_casts(values[values.isfinite()], dtype)


def test_every_fp16_value_in_fp4() -> None:
    """Against distances: torch has no cast."""
    values = torch.arange(1 << 16).to(torch.uint16).view(torch.float16).float()
    values = torch.cat((values, values / 3))
    values = values[values.isfinite()]
    codes = torch.full(values.shape, 0xAA, dtype=torch.uint8)
    encode_fp4_kernel[(triton.cdiv(len(values), BLOCK),)](values, codes, len(values), BLOCK)
    magnitudes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float64)
    distances = (values.abs().double().unsqueeze(-1) - magnitudes).abs()
    least = distances.amin(-1, keepdim=True)
    # The last of two as near is even where the first is not.
    first, last = (distances == least).int().argmax(-1), 7 - (distances == least).flip(-1).int().argmax(-1)
    expected = torch.where(first % 2 == 0, first, last) + 8 * values.signbit()
    assert torch.equal(codes, expected.to(torch.uint8))


@each_format
def test_every_value_is_its_own_code(dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8)
    values = codes.view(dtype).float()
    finite = values.isfinite()
    assert torch.equal(encode(values[finite], dtype), codes[finite])


@each_format
def test_around_every_midpoint(dtype: torch.dtype) -> None:
    values = representable(dtype)
    midpoints = (values[1:] + values[:-1]) / 2
    up, down = torch.full_like(midpoints, torch.inf), torch.full_like(midpoints, -torch.inf)
    around = torch.cat((midpoints, torch.nextafter(midpoints, up), torch.nextafter(midpoints, down)))
    assert_encoded_as_torch_casts(torch.cat((around, -around)), dtype)


@each_format
def test_anything_larger_saturates(dtype: torch.dtype) -> None:
    end = largest(dtype)
    values = torch.tensor([end, end * 1.01, end * 1.07, end * 2, 3e38, torch.inf])
    codes = encode(torch.cat((values, -values)), dtype).view(dtype).float()
    assert codes.tolist() == [end] * len(values) + [-end] * len(values)


@each_format
def test_smallest_fp32_values_become_zero(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1e-45, 1e-38, 1e-30, 1e-10])
    assert_encoded_as_torch_casts(torch.cat((values, -values)), dtype)
