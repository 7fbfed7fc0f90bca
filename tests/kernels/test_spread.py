"""Rows that several programs share, in the interpreter: what each publishes, and what it makes of the others' parts.

`bare.run_team` says how a team runs where programs run one after another.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from normforge import LayerNormOutput
from normforge.codegen.model import Mode
from normforge.codegen.tiling import power_of_two
from normforge.codegen.values import Cast, DType, FusedAdd, Norm, Pipeline
from normforge.dtypes import TORCH_DTYPES

from ..norms import FULL
from .bare import EMPTY, check_forward, hard_rows, run_forward, run_team

# Untyped, as everything generated; Triton looks a device function up by the name it is called by.
primitives = import_module("normforge.generated.primitives")
load_slice = primitives.load_slice
merge_slices, publish, slice_moments = primitives.merge_slices, primitives.publish, primitives.slice_moments

BLOCK, HELD = 64, 2
MODES = [
    Mode(norm, dtype, dtype, fadd, save_mv=save_mv, cast=cast)
    for norm in FULL
    for dtype, fadd, save_mv, cast in (
        (DType.BF16, FusedAdd.NONE, False, Cast.AFTER_WEIGHT),
        (DType.BF16, FusedAdd.NONE, False, Cast.BEFORE_WEIGHT),
        (DType.FP16, FusedAdd.NONE, True, Cast.AFTER_WEIGHT),
        (DType.BF16, FusedAdd.PRE_ADD_STORE, True, Cast.AFTER_WEIGHT),
        (DType.FP16, FusedAdd.PRE_ADD, False, Cast.AFTER_WEIGHT),
    )
    if not (norm.centres and fadd.adds)
]


def run(
    mode: Mode, teams: int, x: torch.Tensor, vectors: dict[str, torch.Tensor], *, paired: bool = False
) -> LayerNormOutput:
    m, n = x.shape
    slices = -(-n // (BLOCK * HELD))
    cut = {"BLOCK": BLOCK, "HELD": HELD, "PEERS": power_of_two(slices), "PAIRED": paired}

    def launch(exchange: dict[str, torch.Tensor]) -> LayerNormOutput:
        given = vectors | {"x": x} | exchange
        if mode.fadd.stores:
            # In place, where a row that another team has stored is loaded once more for nothing.
            given["residual"] = given["residual_out"] = vectors["residual"].clone()
        return run_forward(mode, Pipeline.SPREAD, (slices, teams), given, cut)

    return run_team(launch, slices, m)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize(
    ("n", "m", "teams", "paired"),
    [
        *((1, 1, 1, False), (100, 7, 3, True), (100, 5, 5, False), (128, 9, 2, True)),
        *((129, 4, 3, False), (300, 7, 2, True), (512, 3, 1, True), (1000, 5, 4, False)),
    ],
)
def test_a_team_publishes_what_its_rows_need(n: int, m: int, teams: int, paired: bool, mode: Mode) -> None:
    """One slice a row, then ragged last slices of 1, 44 and 104 columns, and a row of whole ones."""
    dtype = TORCH_DTYPES[mode.dtype_in]
    x = (torch.randn(m, n + (4 if paired else 3)) * 2 + 5).to(dtype)[:, :n]
    # Operands in 16 bits are read in pairs as well.
    other = dtype if paired else torch.float32
    names = ("weight", "bias") if mode.norm.centres else ("weight",)
    vectors = {name: torch.randn(n).to(other) for name in names}
    if mode.fadd.adds:
        vectors["residual"] = torch.randn(m, n + 2).to(other)[:, :n]
    check_forward(run(mode, teams, x, vectors, paired=paired), mode, x, vectors)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16], ids=lambda dtype: dtype.value)
def test_a_row_of_1e4_and_the_noise_that_16_bits_leave(dtype: DType) -> None:
    """A mean that is published is rounded to fp32: that is 5e-4 at 1e4, where fp16 steps by 8 and bf16 by 64."""
    mode, step = Mode(Norm.LAYER, dtype, dtype, save_mv=True), {DType.FP16: 8.0, DType.BF16: 64.0}[dtype]
    x = (10048.0 + step * torch.randint(-1, 2, (2, 1000))).to(TORCH_DTYPES[dtype])
    check_forward(run(mode, 1, x, {}), mode, x, {})


def slices_of(row: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.split(row.double(), SLICE, dim=-1))


def _moments_of_slice(
    x_ptr: Any, mean_ptr: Any, variance_ptr: Any, N: tl.constexpr, SLICE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    first_col = tl.program_id(0) * SLICE
    chunks = load_slice(x_ptr, first_col, N, SLICE, BLOCK, False)
    mean, variance = slice_moments(chunks, x_ptr.dtype.element_ty, first_col, N, SLICE, BLOCK)
    tl.store(mean_ptr + tl.program_id(0), mean)
    tl.store(variance_ptr + tl.program_id(0), variance)


moments_of_slice: Any = triton.jit(_moments_of_slice)


def _merge(
    means_ptr: Any, variances_ptr: Any, out_ptr: Any, N: tl.constexpr, SLICE: tl.constexpr, PEERS: tl.constexpr
) -> None:
    peers = tl.arange(0, PEERS)
    means = tl.load(means_ptr + peers, mask=peers * SLICE < N, other=0.0)
    variances = tl.load(variances_ptr + peers, mask=peers * SLICE < N, other=0.0)
    pivot, shift, variance = merge_slices(means, variances, peers, N, SLICE)
    tl.store(out_ptr, pivot)
    tl.store(out_ptr + 1, shift)
    tl.store(out_ptr + 2, variance)


merge: Any = triton.jit(_merge)


def _publish_bits(first_ptr: Any, second_ptr: Any, slots_ptr: Any, COUNT: tl.constexpr) -> None:
    at = tl.arange(0, COUNT)
    publish(slots_ptr + at, tl.load(first_ptr + at), tl.load(second_ptr + at), None)


publish_bits: Any = triton.jit(_publish_bits)


SLICE, SLICE_BLOCK = 512, 128


@pytest.mark.parametrize("n", [1, 5, 512, 515, 1000, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", hard_rows(1))
def test_moments_of_a_slice(name: str, dtype: torch.dtype, n: int) -> None:
    """No table spreads rows of fp32; in 16 bits a constant and noise of 1e-2 are one value, whose variance is 0."""
    x = hard_rows(n, 5e4)[name].to(dtype)
    parts = slices_of(x)
    mean, variance = torch.empty(len(parts)), torch.empty(len(parts))
    moments_of_slice[(len(parts),)](x, mean, variance, n, SLICE, SLICE_BLOCK)
    expected_mean = torch.stack([part.mean() for part in parts])
    expected_variance = torch.stack([part.var(correction=0) for part in parts])
    assert bool(((mean - expected_mean).abs() <= 2e-7 * x.abs().max()).all())
    assert bool(((variance - expected_variance).abs() <= 2e-6 * expected_variance + 1e-12).all())


@pytest.mark.parametrize("n", [1, 512, 513, 1000, 3000])
@pytest.mark.parametrize("name", hard_rows(1))
def test_slices_merge_into_the_moments_of_their_row(name: str, n: int) -> None:
    x = hard_rows(n, 5e4)[name]
    parts = slices_of(x)
    means = torch.stack([part.mean() for part in parts]).float()
    variances = torch.stack([part.var(correction=0) for part in parts]).float()
    out = torch.empty(3)
    merge[(1,)](means, variances, out, n, SLICE, power_of_two(len(parts)))
    # What was rounded to be published is what a row is made of.
    counts = torch.tensor([len(part) for part in parts], dtype=torch.float64)
    mean = (counts * means).sum() / n
    variance = (counts * (variances + (means.double() - mean).square())).sum() / n
    assert (out[:2].double().sum() - mean).abs() <= 1e-7 * variance.sqrt() + 1e-12
    assert (out[2] - variance).abs() <= 1e-6 * variance + 1e-12


def test_no_two_values_look_like_an_empty_slot() -> None:
    """NaNs of all ones, which x86 and some GPUs hand on from an input, would make a team wait for ever."""
    ones = torch.full((4,), -1, dtype=torch.int32).view(torch.float32)
    plain = torch.tensor([0.0, 1.0, float("nan"), float("-inf")])
    for first, second in ((ones, ones), (ones, plain), (plain, ones), (plain, plain)):
        slots = torch.full((4,), EMPTY)
        publish_bits[(1,)](first, second, slots, 4)
        assert bool((slots != EMPTY).all())
        found = slots.view(torch.float32).view(4, 2).unbind(-1)
        torch.testing.assert_close(found, (first, second), equal_nan=True, rtol=0, atol=0)
