"""Dropout before a fused add: which elements are dropped, to the bit and by chance, and what calls take and refuse."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import normforge
from normforge import random_mask
from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.values import Pipeline
from normforge.families.public import rmsnorm2d_bwd
from normforge.random_mask import dropout_mask
from normforge.selection import dispatch
from normforge.selection.table import RetiledTable

from ..calling import BACKWARD, BACKWARD_ORACLE, FORWARD, each_device, each_norm, same_bits, there

P = 0.3
RNG = (7, 9)

# Seeds and offsets of one word, of two, and of all 64 bits.
STATES = [(0, 0), (1, 5), (2**32 + 3, 2**40 + 1), (2**64 - 1, 2**63 + 12345), (-5, -(2**63))]

# By what a tile of each pipeline holds, rows that fit and rows that do not; the shortest are shorter than what shares
# its random numbers.
TILES = {
    "rows": (Tile(Pipeline.ROWS, 4, 128, 1), (1, 3, 8, 101, 128)),
    "rows-short": (Tile(Pipeline.ROWS, 2, 4, 1), (3, 4)),
    "one_pass": (Tile(Pipeline.ONE_PASS, 1, 256, 1), (100, 601)),
    "one_pass-short": (Tile(Pipeline.ONE_PASS, 1, 4, 1), (2, 13)),
    "two_pass": (Tile(Pipeline.TWO_PASS, 1, 256, 1), (600,)),
}


# Untyped, as everything generated.
primitives = import_module("normforge.generated.primitives")
drop, load_dropout = primitives.drop, primitives.load_dropout


def _draw(out_ptr, rng_ptr, row, N: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's compiler takes no Any
    values = drop(tl.zeros((N,), tl.float32) + 1.0, load_dropout(rng_ptr, 0.5), row, 0, N)
    tl.store(out_ptr + tl.arange(0, N), values)


draw_kernel: Any = triton.jit(_draw)


def at(mode: str, n: int, tile: Tile) -> RetiledTable:
    return RetiledTable(dispatch.loaded(), dispatch.find(Mode.from_name(mode), n), tile)


def added(x: torch.Tensor, residual: torch.Tensor | None = None, **given: Any) -> torch.Tensor:
    """The sum that a call stores."""
    residual = torch.zeros_like(x) if residual is None else residual
    given = {"dropout_p": P, "dropout_rng": RNG, "norm": "rms", **given}
    return there(FORWARD[given.pop("norm")](x, residual=residual, fadd="pre_add_store", **given).residual_out)


def signed(*numbers: int) -> torch.Tensor:
    """Numbers as int64, which has the same bits."""
    return torch.tensor([number - 2**64 if number >= 2**63 else number for number in numbers])


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ((0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 6, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_formula_draws_by_philox(words: tuple[int, ...], answer: tuple[int, ...]) -> None:
    """The known answers that Random123 is published with (kat_vectors, philox4x32 10): counter and key."""
    counter, offset, seed = signed(*(low + (high << 32) for low, high in zip(words[::2], words[1::2], strict=True)))
    drawn = random_mask._bits(seed, offset, counter)
    assert drawn[:, 0].tolist() == [*answer]
    assert drawn[:, 1].tolist() == [(word >> 16) | (word & 0xFFFF) << 16 for word in answer]


@pytest.mark.parametrize("name", TILES)
def test_kernels_drop_what_the_formula_says(name: str) -> None:
    tile, lengths = TILES[name]
    for n, (seed, offset) in zip(lengths, STATES * 2, strict=False):
        x = torch.ones(2 * tile.rows + 1, n)
        kept = dropout_mask(x.shape, P, signed(seed, offset))
        with dispatch.using(at("rms_fwd_fp32_drop_addst", n, tile)):
            total = added(x, dropout_rng=(seed, offset))
        # 1 / (1 - p) in fp32, from p in fp32.
        factor = np.float32(1) / (np.float32(1) - np.float32(P))
        assert torch.equal(total, kept * torch.tensor(factor))
        if tile.pipeline is Pipeline.TWO_PASS:
            tile = Tile(Pipeline.TWO_PASS, 2, 256, 1)
        with dispatch.using(at("rms_bwd_fp32_drop_addst", n, tile)):
            found = rmsnorm2d_bwd(
                torch.zeros_like(x), x, rstd=torch.ones(len(x)), dresidual_out=x, dropout_p=P,
                dropout_rng=(seed, offset), wants=("dx", "ddropped"),
            )  # fmt: skip
        assert torch.equal(there(found.dx), x)
        assert torch.equal(there(found.ddropped), total)


@each_device
@pytest.mark.parametrize(("seed", "offset"), STATES)
def test_kernels_count_rows_beyond_32_bits(seed: int, offset: int, device: str) -> None:
    """As the formula does, of rows that no tensor of a test has."""
    state = signed(seed, offset).to(device)
    for row in (0, 2**31 - 1, 2**32 - 1, 2**33 + 7, 2**40):
        out = torch.empty(64, device=device)
        draw_kernel[(1,)](out, state, row, 64)
        assert torch.equal(out != 0, dropout_mask((64,), 0.5, state, first_row=row))


@each_norm
def test_a_p_of_zero_is_the_call_without(norm: str) -> None:
    x, residual = torch.randn(5, 100), torch.randn(5, 100)
    given: dict[str, Any] = {"residual": residual, "fadd": "pre_add_store"}
    plain = FORWARD[norm](x, **given)
    generator = torch.Generator().manual_seed(1)
    before, default = generator.get_state(), torch.get_rng_state()
    for rng in (None, RNG, torch.tensor(RNG), generator):
        found = FORWARD[norm](x, **given, dropout_p=0.0, dropout_rng=rng)
        assert all(same_bits(a, b) for a, b in zip(found, plain, strict=True))
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), default)
    # What is not fused drops nothing either.
    assert same_bits(FORWARD[norm](x, dropout_p=0.0, dropout_rng=RNG).y, FORWARD[norm](x).y)
    assert normforge.which(x, **given, norm=norm) == normforge.which(
        x, **given, norm=norm, dropout_p=0, dropout_rng=RNG
    )
    assert "_drop_addst" in normforge.which(x, **given, norm=norm, dropout_p=P)


@each_device
def test_what_is_drawn_goes_on_and_comes_back_with_its_state(device: str) -> None:
    x = torch.ones(4, 512, device=device)
    torch.manual_seed(3)
    one, two = added(x, dropout_rng=None), added(x, dropout_rng=None)
    assert not torch.equal(one, two)
    torch.manual_seed(3)
    assert torch.equal(added(x, dropout_rng=None), one)
    assert torch.equal(added(x, dropout_rng=None), two)
    generator = torch.Generator(device).manual_seed(3)
    before = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(added(x, dropout_rng=generator), one)
    assert torch.equal(added(x, dropout_rng=generator), two)
    after = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(before, after)


@each_device
def test_a_seed_and_an_offset_are_the_same_as_numbers_and_as_a_tensor(device: str) -> None:
    x = torch.randn(3, 100, device=device)
    for seed, offset in STATES:
        state = signed(seed, offset).to(device)
        assert torch.equal(added(x, dropout_rng=(seed, offset)), added(x, dropout_rng=state))
        # A part of a larger tensor, wherever that lies.
        assert torch.equal(added(x, dropout_rng=torch.stack((state, state)).flatten()[2:]), added(x, dropout_rng=state))


@each_norm
def test_gradients_are_each_in_their_own_type(norm: str) -> None:
    x, dy = torch.randn(6, 100), torch.randn(6, 100).half()
    statistics = {"rstd": torch.rand(6) + 0.5} | ({"mean": x.mean(-1)} if norm == "layer" else {})
    given: dict[str, Any] = {"dropout_p": P, "dropout_rng": torch.tensor(RNG), **statistics}
    found = BACKWARD[norm](
        dy, x, **given, dx_dtype=torch.bfloat16, dropped_dtype=torch.float16, wants=("dx", "ddropped")
    )
    oracle = BACKWARD_ORACLE[norm](dy, x, **given)
    for got, want, dtype in ((found.dx, oracle.dx, torch.bfloat16), (found.ddropped, oracle.ddropped, torch.float16)):
        torch.testing.assert_close(there(got), there(want).to(dtype), atol=1e-5, rtol=1e-2)
    alone = BACKWARD[norm](dy, x, **given, dropped_dtype=torch.float16, wants=("ddropped",))
    assert alone.dx is None
    assert same_bits(alone.ddropped, found.ddropped)


def test_no_rows_are_dropped_from_none() -> None:
    x = torch.empty(0, 64)
    given: dict[str, Any] = {"dropout_p": P, "dropout_rng": RNG}
    found = rmsnorm2d_bwd(x, x, rstd=torch.empty(0), **given, wants=("dx", "ddropped"))
    assert there(found.ddropped).shape == (0, 64)
    assert dropout_mask((0, 64), P, torch.tensor(RNG)).shape == (0, 64)
