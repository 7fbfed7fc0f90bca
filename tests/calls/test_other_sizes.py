"""Calls of a known kind, of other sizes and addresses: nothing is checked again, and bits are the same; short rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import normforge
from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.tiling import is_ragged, narrowed
from normforge.codegen.values import Pipeline
from normforge.selection import dispatch
from proving.cases import LAYOUTS, Case, cases, gradients, operands

from ..calling import all_plans, each_device, pieces, same_bits
from ..thorough import COSTLY
from .test_wrong_tensors import CALLS as FUNCTIONS

N = 48
# A call of so many rows, samples or tokens.
Call = Callable[[int], Any]


def of_rows(given: dict[str, Any], m: int) -> dict[str, Any]:
    """Return what a call passes with m rows or samples: those that it has, over and over."""
    count = len(given["x"])

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat(m // count + 1, *[1] * (tensor.dim() - 1))[:m].clone()

    return {
        name: cut(each) if isinstance(each, torch.Tensor) and each.shape[:1] == (count,) else each
        for name, each in given.items()
    }


def sized(function: Callable[..., Any], given: dict[str, Any], m: int) -> Any:
    return function(**of_rows(given, m))


def rows(m: int) -> torch.Tensor:
    return torch.randn(m, N, generator=torch.Generator().manual_seed(m))


def called(case: Case, arriving: str) -> Call:
    """Outputs and gradients: fixed numbers arrive, in some layout."""

    def call(m: int) -> tuple[torch.Tensor, ...]:
        own = case.but(shape=(m, *case["shape"][1:]))
        given = operands(own, seed=m)
        outputs = own.run(given)
        numbers = [torch.linspace(-1, 1, each.numel()).view(each.shape).to(each.dtype) for each in outputs]
        return (*outputs, *gradients(outputs, given, [LAYOUTS[arriving](each) for each in numbers]).values())

    return call


def heads(m: int) -> Any:
    """Four of six heads, and two in place."""
    packed = rows(m * 6).view(m, 6, N)
    return normforge.rmsnorm2d_fwd(packed[:, :4]).y, normforge.rmsnorm2d_fwd(packed[:, 4:], out=packed[:, 4:]).y


def scaled(form: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    fp8 = torch.float8_e4m3fn
    return lambda m: normforge.rmsnorm2d_fwd(rows(m).to(fp8), x_scale=form(rows(m).abs()), out_dtype=torch.bfloat16)


def _quantised(samples: int, tokens: int, **given: Any) -> Any:
    x = rows(samples * tokens).view(samples, tokens, N)
    return normforge.quantised_rms_norm(x, **given, group_size=32, out_dtype=torch.float8_e4m3fn)


BARE = ("gate", "residual", "weight", "bias")
(PLAIN, MODULATED, GATED), (GROUP,) = (
    cases("plain", "modulated", "gated", vary=(), shape=(3, N)),
    cases("group", vary=()),
)
MODULATED = MODULATED.but(shape=(2, 16, N), without=BARE)
# By name: the call, sizes that may make a kind known each, and sizes of which nothing is new then.
CALLS: dict[str, tuple[Call, tuple[int, ...], tuple[int, ...]]] = {
    # One row has one scale, as all rows of fp8 may have. Places for other outputs than a plain norm's are looked at.
    **{
        name: (partial(sized, function, given), (len(given["x"]),), (7, 300) if name == "fp8" else (1, 7, 300))
        for name, (function, given) in FUNCTIONS.items()
        if name not in ("quantised into", "modulated")
    },
    "heads": (heads, (3, 1), (2, 4)),
    "fp8, a column of scales": (scaled(lambda x: x[:, :1].contiguous()), (3,), (7, 2)),
    "fp8, one scale": (scaled(lambda x: x.flatten()[5:6]), (3,), (7, 2)),
    **{str(case): (called(case, "contiguous"), (3,), (1, 7)) for case in cases("plain", vary=("norm",), shape=(3, N))},
    # One row's or sample's stride is its own where rows are apart. How many samples share a gradient is part of a kind.
    "modulated, gapped": (called(MODULATED.but(layout="gapped"), "contiguous"), (2, 1), (2, 1)),
    "modulated, a sum": (called(MODULATED.but(without=("weight", "bias")), "contiguous"), (2,), (2,)),
    # Of any number of tokens, unless samples are modulated, of which a kind has any number.
    "quantised, tokens": (partial(_quantised, 2), (3,), (7, 2)),
    "quantised, modulated": (lambda m: _quantised(m, 4, scale=rows(m), shift=rows(m)), (2,), (3, 5)),
    "gated, sigmoid": (called(GATED.but(norm="rms"), "contiguous"), (3,), (9, 1)),
    "gated in groups": (called(GATED.but(group_size=16), "contiguous"), (3,), (9, 1)),
    "gated, gapped": (called(GATED.but(layout="gapped"), "contiguous"), (3, 1), (9, 2)),
    "group, silu": (called(GROUP.but(activation="silu"), "contiguous"), (3,), (5, 1)),
    "group, channels last": (called(GROUP.but(layout="channels last"), "channels last"), (3,), (5, 2)),
}


@COSTLY
@pytest.mark.parametrize(("call", "learnt", "others"), CALLS.values(), ids=CALLS)
def test_a_call_of_another_size_is_not_looked_at(
    call: Call, learnt: tuple[int, ...], others: tuple[int, ...], looked: list[str]
) -> None:
    """And returns what it does where nothing is known."""

    def made(m: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(m)
        return pieces(call(m))

    expected = {}
    for m in others:
        dispatch.forget()
        expected[m] = made(m)
    dispatch.forget()
    for m in learnt:
        made(m)
    looked.clear()
    for m in others:
        assert all(map(same_bits, made(m), expected[m]))
    assert looked == []


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("function", "given"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_no_rows(function: Callable[..., Any], given: dict[str, Any], invariant: bool) -> None:
    """Every output has none either, and gradients of vectors are zeros; neither has bits that depend on a batch."""
    usual = pieces(sized(function, given, len(given["x"])))
    with normforge.batch_invariant(invariant):
        for made, like in zip(pieces(sized(function, given, 0)), usual, strict=True):
            assert (made is None) == (like is None)
            if made is not None and like is not None:
                assert (made.dtype, made.shape[1:]) == (like.dtype, like.shape[1:])
                assert not made.numel() or (made.shape == like.shape and not made.any())


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        *cases("plain", "modulated", "gated", vary=("norm",), shape=(2, 8, N), layout="transposed"),
        PLAIN.but(layout="transposed", without=("residual",)),
        PLAIN.but(layout="transposed", dropout_p=0.5, dropout_rng=(1, 2)),
    ],
    ids=str,
)
def test_kernels_for_rows_that_are_copied_are_chosen_once(case: Case, recorded: bool, looked: list[str]) -> None:
    given = operands(case)
    with torch.set_grad_enabled(recorded):
        for _ in range(2):
            looked.clear()
            outputs = case.run(given)
            if recorded:
                gradients(outputs, given, [LAYOUTS["transposed"](torch.ones_like(each)) for each in outputs])
    assert "kernel" not in looked


def _gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(normforge.rms_norm(x, x.shape[-1:]).sum(), x)[0]


OF_SHORT_ROWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "forward": lambda x: normforge.layernorm2d_fwd(x).y,
    "add": lambda x: normforge.rmsnorm2d_fwd(x, residual=x, fadd="pre_add_store").y,
    # Of 16 bits: for fp32 gradients sm_90 has a measured tile of narrow chunks.
    "backward": lambda x: _gradient(x.bfloat16().requires_grad_()),
}


@pytest.mark.parametrize(
    ("tile", "expected"),
    [
        (
            Tile(Pipeline.ROWS, 8, 128, 2),
            {128: (8, 128), 65: (8, 128), 64: (16, 64), 33: (16, 64), 32: (32, 32), 3: (64, 16)},
        ),
        (Tile(Pipeline.ROWS, 8, 32, 1), {100: (8, 32), 65: (8, 32), 64: (16, 16), 40: (16, 16), 3: (16, 16)}),
        # A tile of one row stays.
        (Tile(Pipeline.ONE_PASS, 1, 128, 1), {16: (1, 128)}),
    ],
)
def test_as_many_more_rows_as_they_are_shorter(tile: Tile, expected: dict[int, tuple[int, int]]) -> None:
    """And chunks as much narrower, down to sixteen columns."""
    for n, (rows, block) in expected.items():
        assert narrowed(tile, n, 128) == replace(tile, rows=rows, block=block)


# A mode, a tile for many rows, and lengths that fill it, and that do not.
FILLED: dict[str, tuple[str, Tile, list[int], list[int]]] = {
    "several rows": ("ln_fwd_bf16", Tile(Pipeline.ROWS, 4, 256, 1), [208, 256], [136, 200]),
    "masked": ("ln_fwd_bf16", Tile(Pipeline.TWO_PASS, 1, 4096, 4), [3072, 4096, 1000], [2304, 2560]),
    "a narrow chunk": ("ln_fwd_bf16", Tile(Pipeline.ONE_PASS, 1, 256, 2), [512, 768, 700], [560, 640]),
    "memory-bound": ("rms_fwd_bf16", Tile(Pipeline.TWO_PASS, 1, 2048, 4), [1536, 1792, 2048], [1104, 1152]),
    "with an add": ("ln_fwd_bf16_addst", Tile(Pipeline.TWO_PASS, 1, 2048, 8), [3072, 1536], [2304, 1288]),
    "rows that begin anywhere": ("ln_fwd_bf16_addst", Tile(Pipeline.TWO_PASS, 1, 1024, 8), [2000, 1792], [1800]),
    "backward": ("ln_bwd_bf16", Tile(Pipeline.ONE_PASS, 1, 512, 2, 8, 0, 4), [384, 440, 512], [264, 376]),
    "fp32": ("ln_fwd_fp32", Tile(Pipeline.ONE_PASS, 1, 1024, 8), [2048, 2040], [1104]),
}


@pytest.mark.parametrize(("mode", "tile", "filling", "ragged"), FILLED.values(), ids=FILLED)
def test_what_is_ragged_depends_on_how_many_lanes_are_idle(
    mode: str, tile: Tile, filling: list[int], ragged: list[int]
) -> None:
    lengths = [*filling, *ragged]
    found = [n for n in lengths if is_ragged(Mode.from_name(mode), tile, n)]
    assert found == ragged


@each_device
@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("call", OF_SHORT_ROWS)
@pytest.mark.parametrize("n", [64, 40])
def test_many_rows_are_taken_by_such_tiles(n: int, call: str, device: str) -> None:
    """With 128 columns LayerNorm of 524288x64 took an H200 60 us, and 38 with 64."""
    OF_SHORT_ROWS[call](torch.randn(300, n, device=device))
    constants = dict(all_plans()[-1].prepared(300).launchers[0].key.arguments)
    assert (constants["ROWS"], constants["BLOCK"]) == (16, 64)
