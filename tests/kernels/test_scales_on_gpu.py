"""Scales and their inverses in steps without branches, against division, for every amax there is."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.gpu

# Untyped, as everything generated.
primitives = import_module("normforge.generated.primitives")

BLOCK = 1 << 13
SCALE, INVERSE = primitives.row_scale, primitives.inverse_of


def _differ(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return (a.to(tl.int32, bitcast=True) != b.to(tl.int32, bitcast=True)) & ((a == a) | (b == b))


differ: Any = triton.jit(_differ)


def _count(counts_ptr: tl.tensor, QMAX: tl.constexpr, BLOCK: tl.constexpr) -> None:
    program = tl.program_id(0)
    amax_bits = program * BLOCK + tl.arange(0, BLOCK)
    expected = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), QMAX)
    expected = tl.where(expected < 2.0**-126, 1.0, expected)
    scale = SCALE(amax_bits, QMAX, tl.float32)
    wrong = differ(scale, expected) | differ(INVERSE(scale, True), tl.div_rn(1.0, expected))
    tl.store(counts_ptr + program, tl.sum(wrong.to(tl.int32)))


count_kernel: Any = triton.jit(_count)


@pytest.mark.parametrize("qmax", [6.0, 127.0, 240.0, 448.0, 57344.0])
def test_scales_and_inverses_are_those_of_division(qmax: float) -> None:
    counts = torch.empty((1 << 31) // BLOCK, dtype=torch.int32, device="cuda")
    count_kernel[(len(counts),)](counts, qmax, BLOCK)
    assert counts.sum().item() == 0
