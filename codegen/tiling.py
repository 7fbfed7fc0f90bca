"""The standard ladder of row lengths, and the tile each bucket gets. Both are tables."""

from __future__ import annotations

from .model import Bucket, Direction, DType, Pipeline, Tile

# The last length of each bucket: hidden sizes that models use, so that a row fills its chunks.
STANDARD_LENGTHS = (128, 256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384, 32768, None)

WARP = 32
LOAD_BYTES = 16

# (longest N, rows a program, warps): short rows are cut in two dimensions, so that a warp holds 1024 values or more.
_ROWS_TILES = ((128, 8, 1), (256, 4, 1), (512, 4, 2), (1024, 2, 1))

# (longest row in bytes, warps): a chunk is warps x 32 threads x 16 bytes, so 5120 bf16 values on 4 warps are exactly
# five chunks; more warps once a thread would hold over 48 values.
_ONE_PASS_TILES = ((4096, 2), (10240, 4), (24576, 8), (65536, 16))
LONGEST_ONE_PASS = 16384

# (longest N, loads of 16 bytes in flight a thread), on 32 warps: from 32768 on one row no longer leaves room for a
# second program, and reading it again from L2 (3.84 TB/s on an H200) beats holding it (3.48).
_TWO_PASS_TILES = ((32768, 1), (None, 2))
_TWO_PASS_WARPS = 32


def standard_ladder() -> tuple[Bucket, ...]:
    """The buckets a manifest gets when it names none of its own."""
    return ladder_of(STANDARD_LENGTHS)


def ladder_of(lengths: tuple[int | None, ...]) -> tuple[Bucket, ...]:
    """Adjoining buckets from ascending last lengths; None is the bucket without a cap."""
    buckets = []
    first = 1
    for last in lengths:
        buckets.append(Bucket("nbig" if last is None else f"n{last}", first, last))
        first = 0 if last is None else last + 1
    return tuple(buckets)


# Backward: (longest N, rows, block, warps) of the two-dimensional tiles, 16 values of each operand a thread.
_BWD_ROWS_TILES = ((128, 8, 128, 2), (256, 4, 256, 2), (512, 4, 512, 4), (1024, 2, 1024, 4))
# (longest N, warps): a thread holds this row's x and dy, the next row's, and a sum for each of two gradients. 16 values
# of each suit an H200 best (3.2 TB/s at 4096); at 5120 two programs of 40 (3.1) beat one of 20 (2.4).
_BWD_ONE_PASS_TILES = ((2048, 4), (4096, 8), (6144, 4), (8192, 16))
# Blocks of 2048 columns beat narrower ones by a tenth at N = 32768.
_BWD_TWO_PASS_TILE = Tile(Pipeline.TWO_PASS, rows=2, block=2048, warps=8)


def tile_for(bucket: Bucket, dtype_in: DType, direction: Direction = Direction.FORWARD) -> Tile:
    """The tile for every N of a bucket, chosen by its longest row and x's element size."""
    return (_forward_tile if direction is Direction.FORWARD else _backward_tile)(bucket, dtype_in)


def _backward_tile(bucket: Bucket, dtype: DType) -> Tile:
    for longest, rows, block, warps in _BWD_ROWS_TILES:
        if bucket.last is not None and bucket.last <= longest:
            return Tile(Pipeline.ROWS, rows, block, warps)
    for longest, warps in _BWD_ONE_PASS_TILES:
        if bucket.last is not None and bucket.last <= longest:
            return Tile(Pipeline.ONE_PASS, 1, _chunk(warps, dtype), warps)
    return _BWD_TWO_PASS_TILE


def _forward_tile(bucket: Bucket, dtype_in: DType) -> Tile:
    last = bucket.last
    if last is None or last > LONGEST_ONE_PASS:
        loads = next(loads for longest, loads in _TWO_PASS_TILES if longest is None or (last and last <= longest))
        return Tile(Pipeline.TWO_PASS, 1, _chunk(_TWO_PASS_WARPS, dtype_in) * loads, _TWO_PASS_WARPS)
    for longest, rows, warps in _ROWS_TILES:
        if last <= longest:
            return Tile(Pipeline.ROWS, rows, longest, warps)
    warps = next(warps for most, warps in _ONE_PASS_TILES if last * dtype_in.itemsize <= most)
    return Tile(Pipeline.ONE_PASS, 1, _chunk(warps, dtype_in), warps)


def _chunk(warps: int, dtype: DType) -> int:
    return warps * WARP * LOAD_BYTES // dtype.itemsize
