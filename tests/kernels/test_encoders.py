"""The software fp8 encoders and decoders against torch's casts, bit by bit."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from ..calling import each_device

# Untyped, as everything generated.
primitives = import_module("normforge.generated.primitives")

BLOCK = 1 << 13
ENCODERS = {
    torch.float8_e4m3fn: primitives.to_fp8_e4m3fn,
    torch.float8_e4m3fnuz: primitives.to_fp8_e4m3fnuz,
    torch.float8_e5m2: primitives.to_fp8_e5m2,
}
# Every value of fp16.
FP16 = torch.arange(1 << 16).to(torch.uint16).view(torch.float16).float()
ENCODE_FP4 = primitives.to_fp4_e2m1fn
each_format = pytest.mark.parametrize("dtype", ENCODERS, ids=str)


def _encode(values_ptr: Any, codes_ptr: Any, COUNT: Any, ENCODE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < COUNT
    values = tl.load(values_ptr + offsets, mask=mask, other=0.0)
    tl.store(codes_ptr + offsets, ENCODE(values, tl.uint8), mask=mask)


encode_kernel: Any = triton.jit(_encode)


def _to_fp4(values: Any, dtype: tl.constexpr) -> Any:
    return ENCODE_FP4(values).to(dtype)


to_fp4: Any = triton.jit(_to_fp4)


def encode(values: torch.Tensor, encoder: Any) -> torch.Tensor:
    """The codes that an emitted encoder gives fp32 values."""
    codes = torch.full(values.shape, 0xAA, dtype=torch.uint8)
    grid = (triton.cdiv(len(values), BLOCK),)
    encode_kernel[grid](values, codes, len(values), encoder, BLOCK)
    return codes


def assert_encoded_as_torch_casts(values: torch.Tensor, dtype: torch.dtype) -> None:
    """Fail unless the code of every value, and of its negative, is that of torch's cast of the value, saturated."""
    values, largest = torch.cat((values, -values)), torch.finfo(dtype).max
    expected = values.clamp(-largest, largest).to(dtype).view(torch.uint8)
    codes = encode(values, ENCODERS[dtype])
    wrong = codes != expected
    assert not wrong.any(), list(zip(values[wrong][:5].tolist(), codes[wrong][:5].tolist(), strict=True))


@each_format
def test_values_of_every_size(dtype: torch.dtype) -> None:
    """Every value of fp16, and so of a format; what saturates, and the smallest of fp32, which become zero."""
    larger = torch.finfo(dtype).max * torch.tensor([1, 1.01, 1.07, 2])
    others = torch.tensor([3e38, torch.inf, 0.0, 1e-45, 1e-38, 1e-30, 1e-10])
    assert_encoded_as_torch_casts(torch.cat((FP16[FP16.isfinite()], larger, others)), dtype)


def test_every_fp16_value_in_fp4() -> None:
    """Against distances: torch has no cast."""
    values = torch.cat((FP16, FP16 / 3))
    values = values[values.isfinite()]
    codes = encode(values, to_fp4)
    magnitudes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float64)
    distances = (values.abs().double().unsqueeze(-1) - magnitudes).abs()
    least = distances.amin(-1, keepdim=True)
    # The last of two as near is even where the first is not.
    first, last = (distances == least).int().argmax(-1), 7 - (distances == least).flip(-1).int().argmax(-1)
    expected = torch.where(first % 2 == 0, first, last) + 8 * values.signbit()
    assert torch.equal(codes, expected.to(torch.uint8))


@each_format
def test_around_every_midpoint(dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8).view(dtype).float()
    values = codes[codes.isfinite() & ~codes.signbit()].sort().values
    midpoints, infinity = (values[1:] + values[:-1]) / 2, torch.tensor(torch.inf)
    around = (midpoints, midpoints.nextafter(infinity), midpoints.nextafter(-infinity))
    assert_encoded_as_torch_casts(torch.cat(around), dtype)


DECODERS = {torch.float8_e4m3fn: primitives.from_fp8_e4m3fn, torch.float8_e5m2: primitives.from_fp8_e5m2}
each_decoder = pytest.mark.parametrize("dtype", DECODERS, ids=str)


def _decode(codes_ptr, values_ptr, DECODE: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's compiler takes no Any
    offsets = tl.arange(0, 256)
    tl.store(values_ptr + offsets, DECODE(tl.load(codes_ptr + offsets)))


decode_kernel: Any = triton.jit(_decode)


def decoded(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the emitted decoder makes of 256 codes, bytes or of an fp8 type."""
    values = torch.full((256,), 7.0, device=codes.device)
    decode_kernel[(1,)](codes, values, DECODERS[dtype])
    return values


def assert_same_values(values: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless bits are the same, signs of zeros too, but for those of NaN."""
    assert torch.equal(values.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(values[number].view(torch.int32), expected[number].view(torch.int32))


@each_device
@each_decoder
def test_every_byte(dtype: torch.dtype, device: str) -> None:
    codes = torch.arange(256, device=device).to(torch.uint8)
    expected = codes.view(dtype).float()
    # Two NaNs, or six and two infinities.
    assert int((~expected.isfinite()).sum()) == {torch.float8_e4m3fn: 2, torch.float8_e5m2: 8}[dtype]
    assert_same_values(decoded(codes, dtype), expected)


@pytest.mark.gpu
@each_decoder
def test_every_value_by_instruction(dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card converts nothing to fp8 or from it")
    codes = torch.arange(256, device="cuda").to(torch.uint8).view(dtype)
    assert_same_values(decoded(codes, dtype), codes.float())
