"""Check which tiles no kernel can take, because of pipelines, registers or shared memory, and say why."""

from __future__ import annotations

from .instance import Bucket, Tile
from .tiling import MOST_RESIDENT_WARPS, MOST_WARPS, WARP, Load, TileClass, copies, most_stages, power_of_two
from .values import Direction, Pipeline, ScaleGroup

# Programs that share a row exchange its means rounded to fp32. At 1e4 the rounding is off by 5e-4: below any noise that
# 16 bits can hold there (fp16 steps by 8), but a twentieth of the 1e-2 that fp32 rows must still resolve.
_MOST_SPREAD_BYTES = 2
# Kernels do not compile for narrower chunks: eight adjacent values share a pivot, and 16-bit values are read in pairs.
_LEAST_BLOCKS = {
    (Direction.FORWARD, Pipeline.TWO_PASS): 8,
    (Direction.FORWARD, Pipeline.SPREAD): 2,
    (Direction.BACKWARD, Pipeline.ONE_PASS): 2,
    (Direction.BACKWARD, Pipeline.SPREAD): 2,
}
# The most columns that share a scale.
LONGEST_GROUP = max(size.code for size in ScaleGroup)
# Triton takes a minute to compile 64 chunks; measured tiles have 16 at most.
_MOST_CHUNKS = 32
# Values per thread; a thread addresses 255 registers.
_MOST_VALUES = 256

# GroupNorm: the last positions of a channel may be a tile with one value; the tile of the next channel is full.
_LEAST_PIVOT_TILES = 2
# If the first run is far from all others, the sums of 16 runs are at most 16 times the squares around their own mean.
_MOST_RUNS = 16

# Kernels that may have rows on their way to shared memory.
_STAGED = ((Direction.FORWARD, Pipeline.SPREAD), (Direction.BACKWARD, Pipeline.ONE_PASS))


def why_not(kind: TileClass, bucket: Bucket, tile: Tile, arch: str) -> str | None:
    """Return why no kernel can serve a bucket with a tile on an architecture, or None if one can."""
    if not tile.pipeline.runs_on(arch):
        return f"pipeline {tile.pipeline.value} needs PTX, which {arch} does not run; take two_pass"
    for name in ("rows", "block", "warps"):
        value = getattr(tile, name)
        if value < 1 or value & (value - 1):
            return f"{name} is {value}; it takes a power of two"
    if tile.warps > MOST_WARPS:
        return f"warps is {tile.warps}; a program has at most {MOST_WARPS}"
    if not 1 <= tile.resident <= MOST_RESIDENT_WARPS // tile.warps:
        return (
            f"resident is {tile.resident} programs of {tile.warps} warps; "
            f"a multiprocessor holds 1 to {MOST_RESIDENT_WARPS // tile.warps}"
        )
    if kind.is_grouped:
        return _why_not_of_groups(kind, tile)
    return (
        _why_not_walked(kind, bucket, tile)
        or _why_not_sized(kind, bucket, tile)
        or (_why_not_staged(kind, bucket, tile, arch) if tile.stages != 1 else None)
    )


def _why_not_of_groups(kind: TileClass, tile: Tile) -> str | None:
    """Return why no GroupNorm kernel can take a tile; whether a group fits in registers depends on its shape too."""
    is_whole = tile.pipeline is Pipeline.ONE_PASS
    in_runs = tile.pipeline is Pipeline.TWO_PASS or (is_whole and tile.held)
    if tile.pipeline not in (Pipeline.ONE_PASS, Pipeline.TWO_PASS) or (tile.rows != 1 and not in_runs):
        return (
            f"GroupNorm has no pipeline {tile.pipeline.value} with rows {tile.rows}; take one_pass with rows: 1, "
            "or two_pass, whose rows are runs of held tiles per program"
        )
    if not is_whole and not tile.held:
        return f"held is {tile.held}: a program of {tile.pipeline.value} holds 1 tile or more"
    if tile.held & (tile.held - 1):
        return f"held is {tile.held}; it takes a power of two"
    if in_runs and tile.held < _LEAST_PIVOT_TILES:
        return (
            f"held is {tile.held}: a part is summed around the mean of its first held tiles, and a single tile "
            f"may be almost empty; write held: {_LEAST_PIVOT_TILES} or more"
        )
    if tile.rows > _MOST_RUNS:
        return (
            f"rows is {tile.rows}: sums around the mean of a part's first run lose accuracy with each further run; "
            f"write rows: {_MOST_RUNS} or less"
        )
    if tile.stages != 1:
        return f"stages is {tile.stages}, and no program has a loop over groups; leave stages out"
    values = tile.block * max(tile.held, 1) * (2 if kind.direction is Direction.BACKWARD else 1)
    if values > _MOST_VALUES * WARP * tile.warps:
        return f"a program would hold {values} values on {tile.warps} warps; write a smaller block, held, or more warps"
    return None


def _why_not_walked(kind: TileClass, bucket: Bucket, tile: Tile) -> str | None:
    """Return why a pipeline cannot take the tile's rows and chunks, or None if it can."""
    if tile.pipeline is Pipeline.SPREAD:
        return _why_not_spread(kind, tile)
    if tile.held and not _may_hold(kind, bucket, tile):
        return (
            f"held is {tile.held}; only forward two_pass of modes that move x and y alone keeps chunks, "
            f"{tile.block} columns each, and no more than the shortest row of {bucket} has; leave held out"
        )
    if tile.pipeline is Pipeline.ROWS and bucket.last is None:
        return f"pipeline rows holds rows in registers and {bucket} has no cap; take two_pass"
    if tile.pipeline is Pipeline.ROWS and tile.block < (bucket.last or 0) and not may_cut(kind):
        return (
            f"pipeline rows takes whole rows of {kind.name}: block is {tile.block} and rows are {bucket} long; "
            f"write block: {power_of_two(bucket.last or 1)}, or take another pipeline"
        )
    if tile.pipeline is Pipeline.ONE_PASS and bucket.last is None:
        return f"pipeline one_pass holds a row in registers and {bucket} has no cap; take two_pass"
    is_tiled = tile.pipeline is Pipeline.TWO_PASS and kind.direction is Direction.BACKWARD
    takes_rows = is_tiled or tile.pipeline is Pipeline.ROWS
    if takes_rows and tile.rows == 1:
        # Triton 3.6 turns a single row into scalars, and cannot compile ROW_ALIGNMENT's hint on a scalar.
        instead = "write rows: 2" if is_tiled else "take one_pass"
        return f"pipeline {tile.pipeline.value} takes several rows per program, and rows is 1; {instead}"
    if not takes_rows and tile.rows > 1:
        return f"pipeline {tile.pipeline.value} takes one row per program, and rows is {tile.rows}; write rows: 1"
    return None


def may_cut(kind: TileClass) -> bool:
    """Return True if kernels with several rows per program may split rows; no chunk may split a group of scales."""
    return not kind.is_grouped and kind.load in (Load.PLAIN, Load.ADD, Load.QUANT, Load.DROP, Load.RENORM)


def splits_groups(kind: TileClass, bucket: Bucket, tile: Tile) -> bool:
    """Return True if two chunks of a tile may hold parts of one group of scales, and each would store its own scale."""
    longest = min(bucket.last or LONGEST_GROUP, LONGEST_GROUP)
    return kind.load in (Load.SCALED, Load.ADD_SCALED) and tile.block < longest


def _why_not_sized(kind: TileClass, bucket: Bucket, tile: Tile) -> str | None:
    """Return why chunks are too narrow or too many to compile a kernel, or None if they are not."""
    name = tile.pipeline.value
    least = _LEAST_BLOCKS.get((kind.direction, tile.pipeline), 1)
    if tile.block < least:
        return f"block is {tile.block}; {kind.direction.title} {name} takes {least} columns or more"
    if splits_groups(kind, bucket, tile):
        return (
            f"block is {tile.block}; a chunk of {kind.name} holds whole groups of scales, up to {LONGEST_GROUP} "
            f"columns each; write block: {LONGEST_GROUP}"
        )
    chunks = max(tile.held, 1)
    holds_rows = tile.pipeline in (Pipeline.ROWS, Pipeline.ONE_PASS)
    if holds_rows:
        chunks = -(-(bucket.last or 1) // tile.block)
    if chunks > _MOST_CHUNKS:
        wider = "write a wider block" if holds_rows else f"write held: {_MOST_CHUNKS} or less"
        return f"a program would hold {chunks} chunks, each written out in the machine code; {wider}"
    values = tile.rows * tile.block * chunks
    if values > _MOST_VALUES * WARP * tile.warps:
        return (
            f"a program would hold {values} values on {tile.warps} warps, whose registers hold "
            f"{_MOST_VALUES * WARP * tile.warps}; write fewer rows, a narrower block or more warps"
        )
    return None


def holds_stages(kind: TileClass, bucket: Bucket, tile: Tile, arch: str) -> bool:
    """Return True if shared memory holds a class's tensors in flight; the class of the tile's table may have fewer."""
    return tile.stages == 1 or _why_not_staged(kind, bucket, tile, arch) is None


def _why_not_staged(kind: TileClass, bucket: Bucket, tile: Tile, arch: str) -> str | None:
    if tile.stages < 1 or (kind.direction, tile.pipeline) not in _STAGED:
        return (
            f"stages is {tile.stages}; forward spread and backward one_pass have 1 stage or more, and others 1; "
            "leave stages out"
        )
    if kind.load is Load.GATE:
        return f"stages is {tile.stages}, and kernels with a gate have 1; leave stages out"
    if not copies(arch):
        return f"stages is {tile.stages}, and {arch} has no asynchronous copies to shared memory; leave stages out"
    most = most_stages(arch, tile.resident, _round_bytes(kind, bucket, tile))
    if tile.stages > most:
        return f"stages is {tile.stages}, and the shared memory of {arch} holds {most} of them; write stages: {most}"
    return None


# Backward, three tensors where a sum's gradient is read besides x and dy.
_TENSORS_READ = {Load.ADD: 3, Load.MODULATE: 3}


def _round_bytes(kind: TileClass, bucket: Bucket, tile: Tile) -> int:
    """Return the bytes that a program reads per round: forward slices of x and a residual, backward whole rows."""
    if kind.direction is Direction.FORWARD:
        return tile.held * tile.block * kind.itemsize * (2 if kind.load is Load.ADD else 1)
    longest = tile.block if bucket.last is None else bucket.last
    return -(-longest // tile.block) * tile.block * kind.itemsize * _TENSORS_READ.get(kind.load, 2)


def _why_not_spread(kind: TileClass, tile: Tile) -> str | None:
    if kind.load is Load.GATE:
        return "pipeline spread is for norms without a gate; take two_pass"
    if kind.load is Load.DROP:
        return "pipeline spread is for norms without a dropout; take two_pass"
    if kind.load is Load.MODULATE:
        return "pipeline spread is for norms without a modulation; take two_pass"
    if kind.direction is Direction.BACKWARD:
        fits = tile.rows in (2, 4) and not tile.held
        return None if fits else "pipeline spread, backward, takes rows: 2 or 4 and no held"
    if kind.load is not Load.PLAIN and not (kind.load is Load.ADD and kind.rms):
        return "pipeline spread, forward, is for modes that move x and y alone, and RMSNorm's sums; take two_pass"
    if kind.itemsize > _MOST_SPREAD_BYTES:
        return "pipeline spread, forward, exchanges means as fp32, too coarse for fp32 rows; take two_pass"
    fits = tile.rows == 1 and tile.held > 0 and not tile.held & (tile.held - 1)
    return None if fits else "pipeline spread, forward, takes rows: 1 and held, a program's chunks, as a power of two"


def _may_hold(kind: TileClass, bucket: Bucket, tile: Tile) -> bool:
    return (
        tile.pipeline is Pipeline.TWO_PASS
        and kind.direction is Direction.FORWARD
        and kind.load is Load.PLAIN
        and 0 < tile.held * tile.block <= bucket.first
    )
