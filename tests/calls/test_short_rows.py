"""Tiles of short rows are as wide as these, and of as many more of them, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge
from normforge.calls import known
from normforge.codegen.instance import Tile
from normforge.codegen.values import Pipeline
from normforge.kernels.tile_choice import narrowed
from normforge.selection import dispatch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "forward": lambda x: normforge.layernorm2d_fwd(x).y,
    "add": lambda x: normforge.rmsnorm2d_fwd(x, residual=x, fadd="pre_add_store").y,
    "backward": lambda x: torch.autograd.grad(normforge.rms_norm(x.requires_grad_(), x.shape[-1:]).sum(), x),
}


@pytest.mark.parametrize(
    ("n", "rows", "block"), [(128, 8, 128), (65, 8, 128), (64, 16, 64), (33, 16, 64), (32, 32, 32), (3, 64, 16)]
)
def test_as_many_more_rows_as_they_are_shorter(n: int, rows: int, block: int) -> None:
    tile = Tile(Pipeline.ROWS, 8, 128, 2)
    assert narrowed(tile, n) == Tile(Pipeline.ROWS, rows, block, 2)


def test_a_tile_of_one_row_stays() -> None:
    tile = Tile(Pipeline.ONE_PASS, 1, 128, 1)
    assert narrowed(tile, 16) == tile


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("n", [64, 40])
def test_many_rows_are_taken_by_such_tiles(n: int, call: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 128 columns LayerNorm of 524288x64 took an H200 60 us, and 38 with 64."""
    monkeypatch.setattr(dispatch, "plans", {})
    CALLS[call](torch.randn(300, n, device=device))
    constants = dict(known.all_plans()[-1].prepared(300).steps[0].launcher.key.arguments)
    assert (constants["ROWS"], constants["BLOCK"]) == (16, 64)
