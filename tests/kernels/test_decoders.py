"""The software fp8 decoders against torch's casts, bit by bit, for every byte."""

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

DECODERS = {torch.float8_e4m3fn: primitives.from_fp8_e4m3fn, torch.float8_e5m2: primitives.from_fp8_e5m2}
each_format = pytest.mark.parametrize("dtype", DECODERS, ids=str)


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
@each_format
def test_every_byte(dtype: torch.dtype, device: str) -> None:
    codes = torch.arange(256, device=device).to(torch.uint8)
    expected = codes.view(dtype).float()
    # Two NaNs, or six and two infinities.
    assert int((~expected.isfinite()).sum()) == {torch.float8_e4m3fn: 2, torch.float8_e5m2: 8}[dtype]
    assert_same_values(decoded(codes, dtype), expected)


@pytest.mark.gpu
@each_format
def test_every_value_by_instruction(dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card converts nothing to fp8 or from it")
    codes = torch.arange(256, device="cuda").to(torch.uint8).view(dtype)
    assert_same_values(decoded(codes, dtype), codes.float())
