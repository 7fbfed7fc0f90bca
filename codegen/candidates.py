"""Choose the few tiles that are worth measuring for a row length, from a table of rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from .instance import Bucket, Tile
from .tile_limits import why_not
from .tiling import GROUP_LAYOUTS, LOAD_BYTES, WARP, TileClass, power_of_two
from .values import Direction, Pipeline


@dataclass(frozen=True)
class Rule:
    """The tiles of one pipeline that may suit a range of row lengths.

    Attributes:
        direction: the direction of the kernels.
        few: True for few rows, where the latency of a row counts; False for many rows, where bandwidth counts.
        pipeline: the pipeline of the tiles.
        shortest: the shortest row.
        longest: the longest row, or None for no limit.
        values: the smallest and largest number of values that a thread may hold at once: values of the row if the row
            stays in registers, else values of the current chunk.
        warps: warps per program.
        rows: rows per program.
        loads: bytes that a thread loads at once, which determine the chunk together with the warps; empty if a chunk is
            a whole row.
        resident: programs that a multiprocessor is to hold, which limits the registers of each program.
        held: chunks that a program keeps of a row that it cannot keep whole.
        stages: stages of the loop over rows: one more than the number of rows on their way to shared memory.
        copies: 16-bit values that a thread keeps per value that it holds.
        blocks: columns of a chunk, if programs have several rows and rows have several chunks; empty if a chunk is a
            whole row or follows from `loads`.
    """

    direction: Direction
    few: bool
    pipeline: Pipeline
    shortest: int
    longest: int | None
    values: tuple[int, int]
    warps: tuple[int, ...]
    rows: tuple[int, ...] = (1,)
    loads: tuple[int, ...] = ()
    resident: tuple[int, ...] = (1,)
    held: tuple[int, ...] = (0,)
    stages: tuple[int, ...] = (1,)
    copies: int = 1
    blocks: tuple[int, ...] = ()

    def tiles(self, n: int, itemsize: int) -> Iterator[Tile]:
        """Yield the tiles that this rule allows for rows of n elements."""
        if n < self.shortest or (self.longest is not None and n > self.longest):
            return
        least, most = self.values
        whole = power_of_two(n)
        blocks = [block for block in self.blocks if block < whole] if self.blocks else [whole]
        for warps, rows, load, width, resident, held, stages in product(
            self.warps, self.rows, self.loads or (None,), blocks, self.resident, self.held, self.stages
        ):
            threads = warps * WARP
            block = width if load is None else threads * load // itemsize
            chunks = -(-n // block) if self.blocks else max(held, 1)
            values = n if self.pipeline is Pipeline.ONE_PASS else rows * block * chunks
            # A chunk more than twice as long as the row leaves most lanes idle. A value that stays takes half a
            # register or more.
            fits = least * threads <= values <= most * threads and block < 2 * whole
            if self.blocks:
                # Every thread loads 16 bytes of each chunk, of one row or of two rows.
                fits &= rows * block * itemsize in (threads * LOAD_BYTES, 2 * threads * LOAD_BYTES)
            if fits and resident * (values * self.copies // 2 + _REGISTERS_A_THREAD * threads) <= _REGISTERS:
                yield Tile(self.pipeline, rows, block, warps, resident, held, stages)


_FORWARD, _BACKWARD = Direction.FORWARD, Direction.BACKWARD
_ROWS, _ONE_PASS, _TWO_PASS = Pipeline.ROWS, Pipeline.ONE_PASS, Pipeline.TWO_PASS
_SPREAD = Pipeline.SPREAD
_LOADS = (8, 16)
_WIDTHS, _ROWS_IN_CHUNKS = (16, 32, 64, 128, 256, 512, 1024), (2, 4, 8, 16, 32, 64)

# Registers of a multiprocessor, and the registers that a thread needs for addresses and temporaries.
_REGISTERS = 65536
_REGISTERS_A_THREAD = 24

RULES = (
    Rule(_FORWARD, False, _ROWS, 1, 2048, (16, 64), (1, 2, 4), rows=(2, 4, 8)),
    Rule(_FORWARD, False, _ROWS, 33, 4096, (24, 72), (1, 2, 4), _ROWS_IN_CHUNKS, blocks=_WIDTHS),
    Rule(_FORWARD, False, _ONE_PASS, 512, 32768, (8, 64), (1, 2, 4, 8, 16, 32), loads=_LOADS),
    Rule(_FORWARD, False, _TWO_PASS, 513, 8191, (4, 32), (2, 4, 8, 16), loads=(8, 16, 32, 64)),
    Rule(_FORWARD, False, _TWO_PASS, 8192, 32768, (4, 32), (8,), loads=(16, 32, 64), resident=(1, 2, 4)),
    Rule(_FORWARD, False, _TWO_PASS, 8192, 32768, (4, 32), (16, 32), loads=(16, 32, 64), resident=(1, 2)),
    Rule(_FORWARD, False, _TWO_PASS, 32769, None, (8, 32), (16,), loads=(32, 64), resident=(1, 2)),
    Rule(_FORWARD, False, _TWO_PASS, 32769, None, (8, 32), (32,), loads=(16, 32), resident=(1, 2)),
    Rule(_FORWARD, False, _TWO_PASS, 32768, None, (8, 48), (32,), loads=(16, 32), held=(1, 2, 3, 5)),
    # Registers hold the current row, the next row, weight and bias. Few warps are best: a warp spends as much time on
    # the sums of a row as on 30 values.
    Rule(_FORWARD, False, _SPREAD, 32769, None, (32, 64), (2,), (1,), (16,), (4, 8), (4, 8), stages=(3, 4), copies=4),
    Rule(_FORWARD, False, _SPREAD, 32769, None, (32, 32), (4,), (1,), (16, 64), (4,), (1, 4), stages=(3, 4), copies=4),
    Rule(_FORWARD, False, _SPREAD, 32769, None, (32, 32), (8,), (1,), (16, 64), (2,), (1, 4), stages=(3, 4), copies=4),
    # Without a bias a program has registers for twice as many values.
    Rule(_FORWARD, False, _SPREAD, 65537, None, (64, 64), (8,), (1,), (128,), (2,), (1,), stages=(2,), copies=3),
    Rule(_FORWARD, True, _ONE_PASS, 1, 32768, (4, 32), (1, 2, 4, 8, 16, 32), loads=_LOADS),
    Rule(_FORWARD, True, _TWO_PASS, 16384, None, (4, 32), (16, 32), loads=(16, 32, 64)),
    Rule(_FORWARD, True, _SPREAD, 65537, None, (16, 64), (2,), (1,), (16,), (2, 4), (4, 8), stages=(2, 4), copies=4),
    Rule(_FORWARD, True, _SPREAD, 65537, None, (16, 64), (4,), (1,), (16,), (2, 4), (2, 4), stages=(2, 4), copies=4),
    Rule(_BACKWARD, False, _ROWS, 1, 2048, (16, 32), (2, 4), rows=(2, 4, 8), resident=(4, 8)),
    # Registers hold two sums per value, and x and dy of this tile and the next, 32 bits each. As many warps run as fit.
    *(
        Rule(_BACKWARD, False, _ROWS, 33, 512, values, (warps,), _ROWS_IN_CHUNKS, (), (fit // warps,), blocks=_WIDTHS)
        for values, fit in (((12, 16), 16), ((20, 28), 12), ((20, 32), 8))
        for warps in (1, 2, 4)
    ),
    Rule(_BACKWARD, False, _ONE_PASS, 1025, 8192, (12, 32), (4, 8, 16), loads=_LOADS, resident=(1, 2, 3, 4)),
    # Rows are on their way to shared memory. Registers hold two sums per value, 32 bits each, and x, dy and weight.
    Rule(_BACKWARD, False, _ONE_PASS, 257, 2048, (8, 16), (2, 4, 8), (1,), _LOADS, (3, 4, 8), stages=(3, 4), copies=7),
    Rule(_BACKWARD, False, _ONE_PASS, 2049, 8192, (8, 40), (4, 8, 16), (1,), (16,), (1, 2, 3), stages=(3,), copies=7),
    Rule(_BACKWARD, False, _TWO_PASS, 8193, None, (8, 32), (4, 8), rows=(2,), loads=(16,), resident=(1, 2, 4)),
    Rule(_BACKWARD, False, _SPREAD, 8193, None, (16, 32), (4, 8), rows=(2, 4), loads=(16,), resident=(2, 3, 4)),
    Rule(_BACKWARD, True, _ROWS, 1, 2048, (4, 16), (1, 2, 4, 8), rows=(2,)),
    Rule(_BACKWARD, True, _ONE_PASS, 512, 16384, (4, 24), (4, 8, 16, 32), loads=(16,)),
    Rule(_BACKWARD, True, _TWO_PASS, 6144, None, (8, 32), (4, 8), rows=(2,), loads=(16,)),
)


def candidates(
    kind: TileClass, bucket: Bucket, n: int, arch: str, *, few: bool, rules: tuple[Rule, ...] = RULES
) -> list[Tile]:
    """Return the tiles to measure for a bucket at one of its row lengths, without duplicates.

    Args:
        kind: the class of modes.
        bucket: the row lengths that the winner is to serve.
        n: the row length to measure at.
        arch: the architecture to measure on.
        few: True for few rows, False for many.
        rules: the rules to choose from.
    """
    if kind.is_grouped:
        return [tile for tile in group_candidates(kind, n, few=few) if why_not(kind, bucket, tile, arch) is None]
    allowed = (
        tile
        for rule in rules
        if rule.direction is kind.direction and rule.few is few
        for tile in rule.tiles(n, kind.itemsize)
    )
    return [tile for tile in dict.fromkeys(allowed) if why_not(kind, bucket, tile, arch) is None]


# GroupNorm: the longest group that one program may hold, and the shortest group that is worth several programs.
_LONGEST_WHOLE_GROUP, _SHORTEST_IN_PARTS = 32768, 2048
# GroupNorm: runs of tiles per part. Few groups need many parts; with many groups a part may be a whole group.
_GROUP_RUNS = {True: (1, 2, 4), False: (1, 4, 16)}
# (warps, elements per tile, tiles held) of a part. A thread holds 16 to 32 values of x, and backward as many of dy.
_GROUP_PARTS = {
    Direction.FORWARD: (
        (2, 1024, 2),
        (4, 1024, 2),
        (4, 1024, 4),
        (4, 2048, 2),
        (8, 2048, 2),
        (8, 2048, 4),
        (16, 4096, 4),
    ),
    Direction.BACKWARD: ((4, 1024, 2), (8, 1024, 2), (8, 1024, 4), (8, 2048, 2), (16, 2048, 2), (16, 2048, 4)),
}
# Values of x that a thread holds of a whole group.
_GROUP_VALUES = {Direction.FORWARD: (8, 64), Direction.BACKWARD: (4, 32)}
# With channels innermost, a program has at most as many groups as 64 bytes of channels hold.
_GROUPS_BESIDE = 8
# Tiles of a group that one program holds, by whether channels are innermost. Each tile is written out: Triton takes 20
# s to compile 8 tiles with channels innermost, and 57 s to compile 64 tiles without.
_MOST_TILES = {True: 4, False: 8}


def group_candidates(kind: TileClass, n: int, *, few: bool) -> list[Tile]:
    """Return the tiles to measure for groups of n elements: whole groups, and parts of groups."""
    least, most = _GROUP_VALUES[kind.direction]
    is_last = kind.layout == GROUP_LAYOUTS[True]
    candidates = []
    for warps, most_block in product((1, 2, 4, 8, 16, 32), (512, 2048)):
        threads, block = warps * WARP, min(most_block, power_of_two(n))
        is_short = n <= min(_LONGEST_WHOLE_GROUP, _MOST_TILES[is_last] * block)
        if is_short and min(least * threads, 32 * warps) <= n <= most * threads:
            candidates.append(Tile(_ONE_PASS, 1, block, warps))
    # With channels innermost, a program has several groups, because the channels of one group do not fill a memory
    # transaction.
    longest = 2 * n * (_GROUPS_BESIDE if is_last else 1)
    for (warps, block, held), runs in product(_GROUP_PARTS[kind.direction], _GROUP_RUNS[few]):
        if n >= _SHORTEST_IN_PARTS and block * held * runs < longest:
            candidates.append(Tile(_TWO_PASS, runs, block, warps, held=held))
    return list(dict.fromkeys(candidates))
