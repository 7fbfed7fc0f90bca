"""Which launches have rows on their way to shared memory: what hardware can copy there, and what fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import normforge
from normforge.codegen.instance import Tile
from normforge.codegen.tiling import with_room
from normforge.codegen.values import Pipeline
from normforge.kernels.gpu import Target, named_target
from normforge.kernels.pipelines import staged

SM_90 = named_target("sm_90")
TILE = Tile(Pipeline.ONE_PASS, 1, 1024, 4, resident=8, stages=6)
UNSTAGED = Tile(Pipeline.ONE_PASS, 1, 1024, 4, resident=4)


@pytest.mark.parametrize(
    ("n", "itemsizes", "is_paired", "target", "expected"),
    [
        # 26 KiB a program: rows of 4, 6, 8 and 12 KiB.
        (1024, (2, 2), True, SM_90, 6),
        (1024, (4, 2), True, SM_90, 5),
        (1024, (4, 4), True, SM_90, 4),
        (1024, (4, 4, 4), True, SM_90, 3),
        # A ragged row takes whole chunks.
        (1025, (4, 4), True, SM_90, 2),
        # Elements of 2 bytes one by one are too short to be copied, those of 4 are not.
        (1024, (2, 2), False, SM_90, 1),
        (1024, (4, 2), False, SM_90, 1),
        (1023, (4, 4), False, SM_90, 4),
        # Another byte a column leaves no room for the third of 13 KiB.
        (1024, (4, 4, 4, 1), True, SM_90, 3),
        (1024, (4, 4, 4, 2), True, SM_90, 2),
        (1024, (2, 2), True, named_target("sm_80"), 5),
        (1024, (2, 2), True, named_target("sm_89"), 3),
        (1024, (2, 2), True, named_target("sm_100"), 6),
        (1024, (2, 2), True, named_target("gfx942"), 1),
        (1024, (2, 2), True, Target("cpu", 32, 1, compiles=False), 1),
    ],
)
def test_as_many_stages_as_a_launch_has_room_for(
    n: int, itemsizes: Sequence[int], is_paired: bool, target: Target, expected: int
) -> None:
    tile = staged(TILE, UNSTAGED, n, itemsizes, is_paired, target)
    assert tile == (UNSTAGED if expected == 1 else replace(TILE, stages=expected))


@pytest.mark.parametrize(
    ("itemsizes", "resident", "expected"),
    [
        # 26 KiB a program and, at half as many, 55: slices of 4096 columns are 8, 16, 24 and 32 KiB.
        ((2,), 8, 4),
        ((2, 2), 8, 2),
        ((2, 4), 8, 2),
        ((4, 4), 8, 1),
        ((2, 2), 4, 4),
        ((2, 4), 4, 3),
    ],
)
def test_a_residual_of_more_bits_leaves_room_for_fewer_stages(
    itemsizes: Sequence[int], resident: int, expected: int
) -> None:
    tile = Tile(Pipeline.SPREAD, 1, 512, 2, resident, held=8, stages=6)
    assert with_room(tile, itemsizes, "sm_90") == replace(tile, stages=expected)


def kernels_of(n: int, dy: torch.dtype, misaligned: tuple[str, ...]) -> set[tuple[str, object]]:
    keys = normforge.compile_keys(
        [n], ["ln_bwd_bf16"], arch="sm_90", dy_dtypes=[dy], misaligned=[misaligned], rows=["many"]
    )
    walkers = [key.key for key in keys if key.key.symbol != "sum_partials"]
    return {(key.symbol.removeprefix("ln_bwd_bf16_"), dict(key.arguments).get("STAGES")) for key in walkers}


@pytest.mark.parametrize(
    ("n", "dy", "misaligned", "expected"),
    [
        (4096, torch.bfloat16, (), ("one_pass", 3)),
        (4096, torch.float32, (), ("one_pass", 3)),
        (4095, torch.bfloat16, (), ("one_pass", 1)),
        (4096, torch.bfloat16, ("x",), ("one_pass", 1)),
        (768, torch.bfloat16, (), ("one_pass", 3)),
        # What other architectures take.
        (767, torch.bfloat16, (), ("rows", None)),
    ],
)
def test_a_launch_whose_rows_cannot_be_copied_takes_them_to_registers(
    n: int, dy: torch.dtype, misaligned: tuple[str, ...], expected: tuple[str, int | None]
) -> None:
    assert kernels_of(n, dy, misaligned) == {expected}
