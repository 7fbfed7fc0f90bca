"""A tile that a table may have, whatever it is, is one with which kernels compile and compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from normforge.codegen.errors import TileTableError
from normforge.codegen.instance import ANY, Bucket, Instance, Tile, Tiles
from normforge.codegen.model import Mode
from normforge.codegen.tile_tables import read_table
from normforge.codegen.tiling import class_of
from normforge.codegen.values import Direction, DType, Norm, Pipeline
from normforge.kernels.obtain import compile_for
from normforge.selection import dispatch
from normforge.selection.table import RetiledTable, load_folder

from ..calling import check
from ..folders import write
from ..kernels.compile_cases import SM_90, keys_of
from ..thorough import THOROUGH
from .documents import tiles
from .world import fire, new_world

MODES = (
    Mode(Norm.LAYER, DType.BF16, DType.BF16),
    Mode(Norm.RMS, DType.FP32, DType.FP32),
    Mode(Norm.LAYER, DType.BF16, DType.BF16, direction=Direction.BACKWARD),
    Mode(Norm.RMS, DType.FP32, DType.FP32, direction=Direction.BACKWARD),
)


def accepted(text: str, mode: Mode, n: int, world: Path) -> Tile:
    """The tile that a text is for rows of n elements; an example that no table may have ends there."""
    (world / "sm_90.yaml").write_text(f"{class_of(mode).name}:\n  {n}..{n}:\n    large: {text}\n    small: {text}\n")
    try:
        ((_, chosen),) = read_table(world / "sm_90.yaml").rows[class_of(mode)]
    except TileTableError:
        reject()
    return chosen.large


LENGTHS = st.sampled_from((1, 2, 15, 16, 100, 129, 513))


@fire(25)
@given(tiles(), st.sampled_from(MODES[:2]), LENGTHS)
def test_a_tile_that_is_accepted_computes(text: str, mode: Mode, n: int) -> None:
    with new_world() as world:
        tile = accepted(text, mode, n, world)
        assume(tile.pipeline is not Pipeline.SPREAD)
        made = Instance(mode, Bucket(f"n{n}", n, n), ((ANY, Tiles(tile, tile)),))
        table = load_folder(write(world / "k", [made]))
        (entry,) = table
        x = torch.randn(3, n, dtype=torch.bfloat16 if mode.dtype_in is DType.BF16 else torch.float32)
        with dispatch.using(RetiledTable(table, entry, tile)):
            check(mode.norm.value, x)


# Triton copies a loop's loads for each stage: a kernel of 256 takes three minutes to compile.
@pytest.mark.compile
@pytest.mark.parametrize("most_stages", [8, pytest.param(32, marks=THOROUGH)])
@fire(12)
@given(tiles(), st.sampled_from(MODES), LENGTHS)
def test_a_tile_that_is_accepted_compiles(most_stages: int, text: str, mode: Mode, n: int) -> None:
    with new_world() as world:
        tile = accepted(text, mode, n, world)
        assume(tile.stages <= most_stages)
        for key in keys_of(mode, n, tile=tile):
            assert compile_for(key.key, key.function, SM_90).asm["cubin"]
