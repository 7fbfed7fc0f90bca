"""Several rows a program: a few rows take another kernel, so these calls are made of a table that has no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import normforge
from normforge import LayerNormOutput, reference
from normforge.codegen.instance import Tile
from normforge.codegen.values import Pipeline
from normforge.selection import dispatch
from normforge.selection.table import RetiledTable
from normforge.tools.compare import compare

ROWS, BLOCK = 4, 128
# A tile and a part of one.
M = ROWS + 1
# A ragged chunk, and a full one; the same at the end of several.
LENGTHS = [1, 5, 100, BLOCK]
BLOCKS = [BLOCK, 32]
POISON = 7.0


@pytest.fixture(autouse=True, params=BLOCKS, ids=lambda block: f"chunks of {block}")
def _rows_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    table = dispatch.loaded()
    # The modes of the calls below.
    for name in ("ln_fwd_fp16_addst", "rms_fwd_bf16_int8_addst_sdq"):
        entry = table.find(name, BLOCK)
        assert entry is not None
        table = RetiledTable(table, entry, Tile(Pipeline.ROWS, ROWS, request.param, 1))
    with dispatch.using(table):
        yield


def framed(n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor with a row more on each side, and a chunk behind each row, and the (M, n) view in its midst."""
    around = torch.full((M + 2, n + BLOCK), POISON).to(dtype)
    return around, around[1:-1, :n]


def assert_frame(around: torch.Tensor, n: int) -> None:
    around = around.clone()
    around[1:-1, :n] = POISON
    assert bool((around == POISON).all())


def agree(actual: LayerNormOutput, expected: reference.ReferenceOutput) -> None:
    assert [finding for finding in compare(actual, expected) if not finding.ok] == []


@pytest.mark.parametrize("n", LENGTHS)
def test_layer_norm_of_a_sum(n: int) -> None:
    x, residual = 3 + torch.randn(M, n + 1).half()[:, :n], torch.randn(M, n + 8)[:, :n]
    weight, bias = torch.randn(n), torch.randn(n).bfloat16()
    given: dict[str, Any] = {"residual": residual, "fadd": "pre_add_store", "eps": 0.5}
    around, out = framed(n, torch.float16)
    wider, residual_out = framed(n, torch.float32)
    actual = normforge.layernorm2d_fwd(x, weight, bias, **given, out=out, residual_out=residual_out)
    agree(actual, reference.layernorm2d_fwd(x, weight, bias, **given))
    assert_frame(around, n)
    assert_frame(wider, n)


@pytest.mark.parametrize("n", LENGTHS)
def test_rms_norm_quantised(n: int) -> None:
    x, residual, weight = torch.randn(M, n + 3).bfloat16()[:, :n], torch.randn(M, n), torch.randn(n)
    given: dict[str, Any] = {"residual": residual, "fadd": 1, "smooth_scale": 0.5 + torch.rand(n), "fquant": 1}
    given |= {"weight_offset": 1.0, "eps": 0.5}
    around, out = framed(n, torch.int8)
    actual = normforge.rmsnorm2d_fwd(x, weight, **given, out=out)
    agree(actual, reference.rmsnorm2d_fwd(x, weight, **given))
    assert_frame(around, n)
