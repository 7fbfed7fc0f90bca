"""Tiles of short rows are as wide as these, and of as many more of them, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge
from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.tiling import is_ragged, narrowed
from normforge.codegen.values import Pipeline
from normforge.selection import dispatch

from ..calling import each_device


def _gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(normforge.rms_norm(x, x.shape[-1:]).sum(), x)[0]


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "forward": lambda x: normforge.layernorm2d_fwd(x).y,
    "add": lambda x: normforge.rmsnorm2d_fwd(x, residual=x, fadd="pre_add_store").y,
    # Of 16 bits: for fp32 gradients sm_90 has a measured tile of narrow chunks.
    "backward": lambda x: _gradient(x.bfloat16().requires_grad_()),
}


@pytest.mark.parametrize(
    ("n", "rows", "block"), [(128, 8, 128), (65, 8, 128), (64, 16, 64), (33, 16, 64), (32, 32, 32), (3, 64, 16)]
)
def test_as_many_more_rows_as_they_are_shorter(n: int, rows: int, block: int) -> None:
    tile = Tile(Pipeline.ROWS, 8, 128, 2)
    assert narrowed(tile, n, 128) == Tile(Pipeline.ROWS, rows, block, 2)


def test_a_tile_of_one_row_stays() -> None:
    tile = Tile(Pipeline.ONE_PASS, 1, 128, 1)
    assert narrowed(tile, 16, 128) == tile


@pytest.mark.parametrize(("n", "rows", "block"), [(100, 8, 32), (65, 8, 32), (64, 16, 16), (40, 16, 16), (3, 16, 16)])
def test_chunks_are_as_much_narrower_down_to_sixteen_columns(n: int, rows: int, block: int) -> None:
    assert narrowed(Tile(Pipeline.ROWS, 8, 32, 1), n, 128) == Tile(Pipeline.ROWS, rows, block, 1)


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
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("n", [64, 40])
def test_many_rows_are_taken_by_such_tiles(n: int, call: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 128 columns LayerNorm of 524288x64 took an H200 60 us, and 38 with 64."""
    monkeypatch.setattr(dispatch, "plans", {})
    CALLS[call](torch.randn(300, n, device=device))
    constants = dict([*dispatch.plans.values()][-1][0].plan.prepared(300).launchers[0].key.arguments)
    assert (constants["ROWS"], constants["BLOCK"]) == (16, 64)
