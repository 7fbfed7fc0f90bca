"""Rows that several programs share, in the interpreter: what each publishes, and what it makes of the others' parts.

The interpreter runs one program after another, so a program that waits for a later one would wait for ever. A row of
one slice has nobody to wait for; where there are more, every slot is filled before the launch with what will be
published there, only a little off, so that a second launch shows what the first one published.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from normforge import LayerNormOutput
from normforge.calls.outputs import NormGradients
from normforge.codegen.model import Mode
from normforge.codegen.tiling import power_of_two
from normforge.codegen.values import Cast, Direction, DType, FusedAdd, Norm, Pipeline
from normforge.dtypes import TORCH_DTYPES

from ..norms import FULL
from .bare import OFFSET, check_forward, check_gradients, run_backward, run_forward, saved
from .rendering import kernel_of

# Untyped, as everything generated; Triton looks a device function up by the name it is called by.
primitives = import_module("normforge.generated.primitives")
load_slice = primitives.load_slice
merge_slices, publish, slice_moments = primitives.merge_slices, primitives.publish, primitives.slice_moments

EMPTY = -1
# Where rows of a tile stand among its slots, which is up to `stack`.
IN_SLOTS = {2: (0, 1), 4: (0, 2, 1, 3)}
A_LITTLE_OFF = 1.001


def packed(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Slots of an exchange that hold two fp32 values each."""
    low, high = (value.float().contiguous().view(torch.int32).long() for value in (first, second))
    return (low & 0xFFFFFFFF) | (high << 32)


def unpacked(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = slots.to(torch.int32), (slots >> 32).to(torch.int32)
    return low.view(torch.float32), high.view(torch.float32)


def slots_before(expected: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """An exchange before a launch: empty where a row is one slice, else filled with what is a little off."""
    alone = expected[0].shape[1] == 1
    return torch.full(expected[0].shape, EMPTY) if alone else packed(*(value * A_LITTLE_OFF for value in expected))


def slices_of(row: torch.Tensor, width: int) -> list[torch.Tensor]:
    return list(torch.split(row.double(), width, dim=-1))


@dataclass(frozen=True)
class Forward:
    """One forward launch: a mode, rows, and how they are cut."""

    mode: Mode
    m: int
    n: int
    teams: int
    paired: bool = False
    block: int = 64
    held: int = 2

    @property
    def slices(self) -> int:
        return -(-self.n // (self.block * self.held))

    def draw(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        dtype = TORCH_DTYPES[self.mode.dtype_in]
        x = (torch.randn(self.m, self.n + (4 if self.paired else 3)) * 2 + 5).to(dtype)[:, : self.n]
        names = ("weight", "bias") if self.mode.norm.centres else ("weight",)
        # Operands in 16 bits are read in pairs as well.
        operands = {name: torch.randn(self.n).to(dtype if self.paired else torch.float32) for name in names}
        if self.mode.fadd.adds:
            other = dtype if self.paired else torch.float32
            operands["residual"] = torch.randn(self.m, self.n + 2).to(other)[:, : self.n]
        return x, operands

    def published(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """What each program of each row should publish, in fp64."""
        s = x.double() if residual is None else x.double() + residual.double()
        if residual is not None and self.mode.fadd.stores:
            s = (x.float() + residual.float()).to(residual.dtype)
        parts = slices_of(s, self.block * self.held)
        if self.mode.norm.centres:
            means = torch.stack([part.mean(-1) for part in parts], dim=-1)
            return means, torch.stack([part.var(-1, correction=0) for part in parts], dim=-1)
        squares = torch.stack([part.square().sum(-1) / self.n for part in parts], dim=-1)
        return squares, squares

    def run(
        self, package: Path, x: torch.Tensor, exchange: torch.Tensor, vectors: dict[str, torch.Tensor]
    ) -> LayerNormOutput:
        given = vectors | {"x": x, "exchange": exchange}
        if self.mode.fadd.stores:
            # In place, where a row that another team has stored is loaded once more for nothing.
            given["residual"] = given["residual_out"] = vectors["residual"].clone()
        cut = {"BLOCK": self.block, "HELD": self.held, "PEERS": power_of_two(self.slices), "PAIRED": self.paired}
        kernel = kernel_of(package, self.mode, Pipeline.SPREAD)
        return run_forward(kernel, (self.slices, self.teams), self.mode, given, cut)


FORWARD_MODES = [
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


@pytest.mark.parametrize("mode", FORWARD_MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize(
    ("n", "m", "teams", "paired"),
    [
        *((1, 1, 1, False), (100, 7, 3, True), (100, 5, 5, False), (128, 9, 2, True)),
        *((129, 4, 3, False), (300, 7, 2, True), (512, 3, 1, True), (1000, 5, 4, False)),
    ],
)
def test_a_team_publishes_what_its_rows_need(
    n: int, m: int, teams: int, paired: bool, mode: Mode, package: Path
) -> None:
    """One slice a row, then ragged last slices of 1, 44 and 104 columns, and a row of whole ones."""
    problem = Forward(mode, m, n, teams, paired)
    x, vectors = problem.draw()
    expected = problem.published(x, vectors.get("residual"))
    exchange = slots_before(expected)
    actual = problem.run(package, x, exchange, vectors)
    for got, want in zip(unpacked(exchange), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-9)
    if problem.slices > 1:
        actual = problem.run(package, x, exchange, vectors)
    check_forward(actual, mode, x, vectors)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16], ids=lambda dtype: dtype.value)
def test_a_row_of_1e4_and_the_noise_that_16_bits_leave(dtype: DType, package: Path) -> None:
    """A mean that is published is rounded to fp32: that is 5e-4 at 1e4, where fp16 steps by 8 and bf16 by 64."""
    problem = Forward(Mode(Norm.LAYER, dtype, dtype, save_mv=True), 2, 1000, 1)
    step = {DType.FP16: 8.0, DType.BF16: 64.0}[dtype]
    x = (10048.0 + step * torch.randint(-1, 2, (problem.m, problem.n))).to(TORCH_DTYPES[dtype])
    exchange = packed(*problem.published(x))
    check_forward(problem.run(package, x, exchange, {}), problem.mode, x, {})


@dataclass(frozen=True)
class Backward:
    """One backward launch: a mode, rows, and how they are cut."""

    mode: Mode
    m: int
    n: int
    teams: int
    rows: int
    has_weight: bool = True
    paired: bool = False
    block: int = 64

    @property
    def tiles(self) -> int:
        return -(-self.m // self.rows)

    @property
    def slices(self) -> int:
        return -(-self.n // self.block)

    def draw(self) -> dict[str, torch.Tensor]:
        dtype = TORCH_DTYPES[self.mode.dtype_in]
        # A multiple of 2 between rows where they are read in pairs, and another for each tensor.
        apart = self.n + (4 if self.paired else 3)
        tensors = {"x": torch.randn(self.m, apart).to(dtype)[:, : self.n], "dy": torch.randn(self.m, self.n)}
        if self.paired:
            tensors["dy"] = tensors["dy"].half()
        if self.has_weight:
            tensors["weight"] = torch.randn(self.n)
        if self.mode.x_bias:
            tensors["x_bias"] = torch.randn(self.n)
        if self.mode.fadd.stores:
            tensors["dresidual_out"] = torch.randn(self.m, apart + 2).bfloat16()[:, : self.n]
        return tensors

    def published(
        self, tensors: dict[str, torch.Tensor], statistics: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What each program of each tile should publish for each of its rows, in fp64; see `exists`."""
        s = tensors["x"].double() + tensors.get("x_bias", torch.zeros(self.n)).double()
        h = (s - statistics.get("mean", torch.zeros(1)).double().unsqueeze(-1)) * statistics["rstd"].unsqueeze(-1)
        offset = 0.0 if self.mode.norm.centres else OFFSET
        g = tensors["dy"].double()
        if self.has_weight:
            g = g * (tensors["weight"].double() + offset)
        # RMSNorm has no use for the mean of g.
        return self._sums(g * h), self._sums(g if self.mode.norm.centres else torch.zeros_like(g))

    def exists(self) -> torch.Tensor:
        """Which slots belong to a row; what is published for one beyond M is nobody's."""
        rows = torch.arange(self.tiles * self.rows).view(self.tiles, 1, self.rows)[..., IN_SLOTS[self.rows]]
        return (rows < self.m).expand(-1, self.slices, -1)

    def _sums(self, terms: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(self.tiles * self.rows, self.n, dtype=torch.float64)
        padded[: self.m] = terms
        sums = torch.stack([part.sum(-1) for part in slices_of(padded, self.block)], dim=-1)
        return sums.view(self.tiles, self.rows, self.slices).transpose(1, 2)[..., IN_SLOTS[self.rows]]

    def run(
        self,
        package: Path,
        tensors: dict[str, torch.Tensor],
        statistics: dict[str, torch.Tensor],
        exchange: torch.Tensor,
        *,
        wants_dx: bool = True,
    ) -> NormGradients:
        given = tensors | statistics | {"exchange": exchange}
        if wants_dx:
            given["dx"] = torch.full((self.m, self.n), float("nan"), dtype=TORCH_DTYPES[self.mode.dtype_in])
        cut = {"ROWS": self.rows, "BLOCK": self.block, "PEERS": power_of_two(self.slices), "PAIRED": self.paired}
        kernel = kernel_of(package, self.mode, Pipeline.SPREAD)
        return run_backward(kernel, (self.slices, self.teams), self.mode, given, cut)


BACKWARD_MODES = [
    Mode(norm, dtype, dtype, fadd, x_bias=x_bias, direction=Direction.BACKWARD, cast=cast)
    for norm in FULL
    for dtype, fadd, x_bias, cast in (
        (DType.BF16, FusedAdd.NONE, False, Cast.AFTER_WEIGHT),
        (DType.BF16, FusedAdd.NONE, False, Cast.BEFORE_WEIGHT),
        (DType.FP32, FusedAdd.PRE_ADD_STORE, False, Cast.AFTER_WEIGHT),
        (DType.FP32, FusedAdd.PRE_ADD_STORE, True, Cast.AFTER_WEIGHT),
    )
]


@pytest.mark.parametrize("mode", BACKWARD_MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize(
    ("m", "n", "teams", "has_weight", "paired", "wants_dx"),
    [
        *((1, 64, 1, True, False, True), (9, 37, 2, False, False, True), (5, 40, 2, True, False, False)),
        *((19, 50, 3, True, False, True), (19, 50, 3, True, True, True)),
        *((5, 65, 1, False, False, True), (11, 300, 2, True, False, True)),
        *((8, 256, 2, True, False, True), (11, 300, 2, True, True, True)),
    ],
)
def test_a_team_publishes_what_its_tiles_need(
    m: int, n: int, teams: int, has_weight: bool, paired: bool, wants_dx: bool, rows: int, mode: Mode, package: Path
) -> None:
    problem = Backward(mode, m, n, min(teams, -(-m // rows)), rows, has_weight, paired)
    tensors = problem.draw()
    statistics = saved(problem.mode, tensors["x"], tensors.get("x_bias"))
    expected = problem.published(tensors, statistics)
    exchange = slots_before(expected)
    actual = problem.run(package, tensors, statistics, exchange, wants_dx=wants_dx)
    there = problem.exists()
    for got, want in zip(unpacked(exchange), expected, strict=True):
        torch.testing.assert_close(got.double()[there], want[there], rtol=1e-5, atol=1e-4)
    if problem.slices > 1:
        actual = problem.run(package, tensors, statistics, exchange)
    assert (actual.dx is not None) == wants_dx
    check_gradients(actual, mode, tensors | statistics)


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


def made_up_rows(n: int) -> dict[str, torch.Tensor]:
    noise = torch.randn(n)
    return {
        "noise": noise,
        "offset": 1e4 + 1e-2 * noise,
        "offset_by_steps": 1e4 + 64 * noise.round(),
        "constant": torch.full((n,), 12345.678),
        "slices_far_apart": noise + 1e4 * (torch.arange(n) // SLICE % 2),
        "early_outlier": torch.where(torch.arange(n) == 3, 5e4, noise),
        "late_outlier": torch.where(torch.arange(n) == min(400, n - 1), 5e4, noise),
    }


@pytest.mark.parametrize("n", [1, 5, 512, 515, 1000, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", made_up_rows(1))
def test_moments_of_a_slice(name: str, dtype: torch.dtype, n: int) -> None:
    """No table spreads rows of fp32; in 16 bits a constant and noise of 1e-2 are one value, whose variance is 0."""
    x = made_up_rows(n)[name].to(dtype)
    parts = slices_of(x, SLICE)
    mean, variance = torch.empty(len(parts)), torch.empty(len(parts))
    moments_of_slice[(len(parts),)](x, mean, variance, n, SLICE, SLICE_BLOCK)
    expected_mean = torch.stack([part.mean() for part in parts])
    expected_variance = torch.stack([part.var(correction=0) for part in parts])
    assert bool(((mean - expected_mean).abs() <= 2e-7 * x.abs().max()).all())
    assert bool(((variance - expected_variance).abs() <= 2e-6 * expected_variance + 1e-12).all())


@pytest.mark.parametrize("n", [1, 512, 513, 1000, 3000])
@pytest.mark.parametrize("name", made_up_rows(1))
def test_slices_merge_into_the_moments_of_their_row(name: str, n: int) -> None:
    x = made_up_rows(n)[name]
    parts = slices_of(x, SLICE)
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
        for got, want in zip(unpacked(slots), (first, second), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)
