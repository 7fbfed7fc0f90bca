"""What a kernel computes does not depend on how its rows are walked: on one stride, in 32 bits or 64, or as heads."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

import normforge
from normforge.kernels.gpu import ARCHITECTURES
from normforge.kernels.obtain import compile_for

pytestmark = pytest.mark.compile

TARGET = ARCHITECTURES["sm_90"]


def layouts(asm: Mapping[str, str]) -> list[str]:
    """How Triton cuts tensors among threads."""
    return re.findall(r"^#\w+ = #ttg\.[^\n]*", asm["ttgir"], re.MULTILINE)


def arithmetic(asm: Mapping[str, str]) -> list[str]:
    """The operations on floating-point numbers and the exchanges between threads, in order, without their registers."""
    lines = [line for line in asm["ptx"].splitlines() if re.search(r"^\s+[^.].*(\.f32|\.f16|\.bf16|shfl)", line)]
    return [re.sub(r"%\w+|\s+", "", line) for line in lines]


@pytest.mark.parametrize(
    ("mode", "n"),
    [("ln_fwd_bf16", 4096), ("rms_fwd_bf16", 128), ("ln_fwd_fp32", 1000), ("rms_bwd_bf16", 128), ("ln_bwd_bf16", 1024)],
)
def test_rows_on_any_strides_are_added_up_alike(mode: str, n: int) -> None:
    with normforge.batch_invariant():
        strides = [None, (6 * n, 4, n), 2**31 + 16 * n]
        keys = normforge.compile_keys([n], [mode], arch=TARGET.arch, row_strides=strides, rows=["many"])
    found = [compile_for(key.key, key.function, TARGET).asm for key in keys if "sum_partials" not in key.key.kernel]
    assert len(found) == len(strides)
    assert len(arithmetic(found[0])) > 50
    for other in found[1:]:
        assert layouts(other) == layouts(found[0])
        assert arithmetic(other) == arithmetic(found[0])


@pytest.mark.parametrize("norm", ["ln", "rms"])
def test_no_square_of_a_tile_is_fused_with_a_sum(norm: str) -> None:
    """Of two products LLVM may fuse either, and did not take the same one for each row of a tile."""
    with normforge.batch_invariant():
        (key,) = normforge.compile_keys([129], [f"{norm}_fwd_fp32_postaddnorm_mv"], arch=TARGET.arch, rows=["many"])
    ptx = compile_for(key.key, key.function, TARGET).asm["ptx"]
    assert {added for _, added in re.findall(r"\.f32\s+%\w+, (%\w+), \1(.*);", ptx)} == {", 0f00000000"}
