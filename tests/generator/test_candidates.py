"""Which tiles are worth measuring: some for everything there is, each of which can serve, in reach of one GPU."""

from __future__ import annotations

import pytest

from normforge.codegen.candidates import candidates
from normforge.codegen.instance import Tile
from normforge.codegen.tiling import CLASSES, MOST_RESIDENT_WARPS, WARP, TileClass, standard_ladder
from normforge.codegen.values import Direction, Pipeline

# NVIDIA's have every pipeline.
ARCH = "sm_90"

# A row of the bucket without a cap.
LONG = 262144
REGISTERS = 65536

FWD_16, BWD_16 = TileClass(Direction.FORWARD, 2), TileClass(Direction.BACKWARD, 2)
EVERY = [(kind, bucket, few) for kind in CLASSES for bucket in standard_ladder() for few in (False, True)]


def test_what_is_to_reside_on_a_multiprocessor_can() -> None:
    """Warps have slots there, and a thread keeps 24 registers or more, which is what addresses take."""
    for kind, bucket, few in EVERY:
        for tile in candidates(kind, bucket, bucket.last or LONG, ARCH, few=few):
            threads = tile.resident * tile.warps * WARP
            assert threads <= MOST_RESIDENT_WARPS * WARP
            assert REGISTERS // threads >= 24


@pytest.mark.parametrize(
    ("kind", "length", "tile"),
    [
        (FWD_16, 131072, Tile(Pipeline.SPREAD, 1, 512, 2, 4, held=8, stages=3)),
        (FWD_16, 65536, Tile(Pipeline.TWO_PASS, 1, 8192, 32, held=2)),
        (FWD_16, 4096, Tile(Pipeline.TWO_PASS, 1, 2048, 8)),
        (BWD_16, 1024, Tile(Pipeline.ROWS, 2, 1024, 4, 4)),
        (BWD_16, 4096, Tile(Pipeline.ONE_PASS, 1, 4096, 16, 2, stages=3)),
        (BWD_16, 16384, Tile(Pipeline.SPREAD, 4, 1024, 4, 3)),
    ],
)
def test_what_an_h200_was_seen_to_prefer_is_among_them(kind: TileClass, length: int, tile: Tile) -> None:
    bucket = next(bucket for bucket in standard_ladder() if length in bucket)
    assert tile in candidates(kind, bucket, length, ARCH, few=False)


def test_no_row_is_spread_or_staged_where_no_hardware_sees_to_it() -> None:
    """Programs cannot wait for one another there, nor rows come to shared memory by themselves."""
    for kind, bucket, few in EVERY:
        n = bucket.last or LONG
        expected = [
            tile
            for tile in candidates(kind, bucket, bucket.last or LONG, ARCH, few=few)
            if tile.pipeline is not Pipeline.SPREAD and tile.stages == 1
        ]
        assert candidates(kind, bucket, n, "gfx942", few=few) == expected
