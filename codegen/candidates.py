"""Which tiles are worth measuring for a row length: a handful, from rules that are rows of a table."""

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
        direction: which kernels.
        few: whether for a few rows, where one row should take as little time as possible, or for many.
        pipeline: how they walk a row.
        shortest: the shortest row.
        longest: the longest row; None has no cap.
        values: the least and the most values that a thread may hold at once: of a row that stays in registers, or of
            the chunk that it works on.
        warps: warps a program.
        rows: rows a program.
        loads: bytes that a thread loads at once, which with the warps make a chunk; none where a chunk is a row.
        resident: programs a multiprocessor is to hold: the registers of each follow from it.
        held: chunks that a program keeps of a row that it does not keep whole.
        stages: stages of the loop over rows: one more than rows on their way to shared memory.
        copies: how many values of 16 bits a thread keeps for each of those.
        blocks: columns of a chunk where several rows have several; none where a chunk is a row or follows from `loads`.
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
        """The tiles that this rule allows for rows of n elements."""
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
            # A chunk of over twice the row leaves most lanes idle; a value that stays takes half a register or more.
            fits = least * threads <= values <= most * threads and block < 2 * whole
            if self.blocks:
                # Every thread loads 16 bytes of each chunk, of one row or of two.
                fits &= rows * block * itemsize in (threads * LOAD_BYTES, 2 * threads * LOAD_BYTES)
            if fits and resident * (values * self.copies // 2 + _REGISTERS_A_THREAD * threads) <= _REGISTERS:
                yield Tile(self.pipeline, rows, block, warps, resident, held, stages)


_FORWARD, _BACKWARD = Direction.FORWARD, Direction.BACKWARD
_ROWS, _ONE_PASS, _TWO_PASS = Pipeline.ROWS, Pipeline.ONE_PASS, Pipeline.TWO_PASS
_SPREAD = Pipeline.SPREAD
_LOADS = (8, 16)
_WIDTHS, _ROWS_IN_CHUNKS = (16, 32, 64, 128, 256, 512, 1024), (2, 4, 8, 16, 32, 64)

# Of a multiprocessor, and what a thread needs for addresses and temporaries.
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
    # Of the row at hand, the next, weight and bias. Warps are few: each spends as much on a row's sums as on 30 values.
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
    # Of a value its two sums, x and dy of this tile and the next, each in a register of 32 bits: as many warps as fit.
    *(
        Rule(_BACKWARD, False, _ROWS, 33, 512, values, (warps,), _ROWS_IN_CHUNKS, (), (fit // warps,), blocks=_WIDTHS)
        for values, fit in (((12, 16), 16), ((20, 28), 12), ((20, 32), 8))
        for warps in (1, 2, 4)
    ),
    Rule(_BACKWARD, False, _ONE_PASS, 1025, 8192, (12, 32), (4, 8, 16), loads=_LOADS, resident=(1, 2, 3, 4)),
    # Rows on their way to shared memory. A value takes its two sums, of 32 bits, x, dy and weight.
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
    """Tiles to measure for a bucket at one of its row lengths, each once.

    Args:
        kind: the class of modes.
        bucket: what the winner is to serve.
        n: the length it is measured at.
        arch: the architecture it is measured on.
        few: whether for a few rows, or for many.
        rules: what to choose from.
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


# Of GroupNorm: the longest group that one program may hold, and the shortest that is worth several.
_LONGEST_WHOLE_GROUP, _SHORTEST_IN_PARTS = 32768, 2048
# Runs of tiles a part: of a few groups, whose parts are to be many; of many, whose parts may be whole groups.
_GROUP_RUNS = {True: (1, 2, 4), False: (1, 4, 16)}
# (warps, elements a tile, tiles held) of parts, whose threads hold 16 to 32 values of x; of dy backward as many again.
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
# Channels innermost: as many at most as are 64 bytes of channels.
_GROUPS_BESIDE = 8
# Tiles of a group that one program holds, channels innermost or not. Each is written out, and Triton takes 20 s for 8
# of the former, 57 s for 64 of the latter.
_MOST_TILES = {True: 4, False: 8}


def group_candidates(kind: TileClass, n: int, *, few: bool) -> list[Tile]:
    """Tiles to measure for groups of n elements: whole ones, and parts of them.

    Parts whose programs wait for one another were none of the fastest, of 40 cases on an H200.
    """
    least, most = _GROUP_VALUES[kind.direction]
    is_last = kind.layout == GROUP_LAYOUTS[True]
    found = []
    for warps, most_block in product((1, 2, 4, 8, 16, 32), (512, 2048)):
        threads, block = warps * WARP, min(most_block, power_of_two(n))
        is_short = n <= min(_LONGEST_WHOLE_GROUP, _MOST_TILES[is_last] * block)
        if is_short and min(least * threads, 32 * warps) <= n <= most * threads:
            found.append(Tile(_ONE_PASS, 1, block, warps))
    # Channels innermost, a program has several groups: channels of one do not fill what memory hands out at once.
    longest = 2 * n * (_GROUPS_BESIDE if is_last else 1)
    for (warps, block, held), runs in product(_GROUP_PARTS[kind.direction], _GROUP_RUNS[few]):
        if n >= _SHORTEST_IN_PARTS and block * held * runs < longest:
            found.append(Tile(_TWO_PASS, runs, block, warps, held=held))
    return list(dict.fromkeys(found))
