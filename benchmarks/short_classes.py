"""Why cells of the sweep fall short of its goals, as data: classes of cells, and what was tried on each."""

from __future__ import annotations

from dataclasses import dataclass

from .results import Row
from .suites.sweep import MOST_SOME

_ANY = 1 << 62
# Elements: 16 bytes of a 16-bit type. Where it divides a length, a vector starts each row.
_VECTOR = 8


@dataclass(frozen=True)
class ShortClass:
    """Cells that fall short for one reason. A cell is of the first class that covers it.

    Attributes:
        title: what they are.
        text: what their profile says, and what was tried.
        tasks: of which tasks; none named means all.
        norm: of which norm, `ln` or `rms`; empty means both.
        least_n: the shortest row.
        most_n: the longest.
        aligned: whether a vector starts each row; None means both.
        many: whether rows are many, as goals call them; None means both.
    """

    title: str
    text: str
    tasks: tuple[str, ...] = ()
    norm: str = ""
    least_n: int = 1
    most_n: int = _ANY
    aligned: bool | None = None
    many: bool | None = None

    def covers(self, row: Row) -> bool:
        """Return True if a cell belongs to the class."""
        return (
            (not self.tasks or row.task in self.tasks)
            and self.norm in ("", row.norm)
            and self.least_n <= row.n <= self.most_n
            and self.aligned in (None, row.n % _VECTOR == 0)
            and self.many in (None, row.m > MOST_SOME)
        )


CLASSES = (
    ShortClass(
        "Rows that start anywhere, up to 1024 columns",
        "No 16 bytes start a row, so loads are of 2 to 8, and instructions are what counts. Narrow chunks are "
        "new: LayerNorm of 81 columns takes 195 µs, 498 in one chunk. With an add, and quantised, one chunk "
        "stayed the fastest of 5 to 18 tiles.",
        most_n=1024,
        aligned=False,
    ),
    ShortClass(
        "Rows that start anywhere, beyond",
        "Windows keep 16-byte loads for plain rows up to 7168 columns; longer ones, adds, quantised rows and "
        "gradients are read element by element. Windows over weights that are read shifted were not built.",
        aligned=False,
    ),
    ShortClass(
        "Gradients of many rows up to 1024 columns",
        "A value takes its sums for weight and bias, and x and dy of this tile and the next: 24 values a thread "
        "are 150 to 200 registers, which leaves a multiprocessor 8 to 12 warps. Chunks of 16 to 256 columns on 1"
        " to 4 warps were tried, and those that took less time are in: 4 to 21 % less. With 32 values a thread "
        "they spill.",
        tasks=("backward",),
        most_n=1024,
        many=True,
    ),
    ShortClass(
        "Gradients of many rows beyond 1024 columns",
        "Rows beyond 8192 are shared by programs that exchange their sums, or are read twice. normforge tune "
        "tried 20 to 30 tiles for each range, at its longest row and a quarter up it.",
        tasks=("backward",),
        many=True,
    ),
    ShortClass(
        "Gradients of up to 2048 rows",
        "So few long rows are hardly a wave of programs, and each leaves sums of a whole row, which a second "
        "kernel adds up. torch.compile reduces columns in a kernel of its own. Tiles are the fastest of tune's "
        "for 512 to 2048 rows; fewer programs were not tried.",
        tasks=("backward",),
    ),
    ShortClass(
        "Quantised rows beyond 8192 columns",
        "Beyond 32,768 columns a row is read three times: for its moments, for its amax, and to be quantised. "
        "Chunks side by side, as plain rows have them, spill: 41592 columns took 1042 µs, 473 in a loop. Up to "
        "there all of a row is in registers, 32 warps of them.",
        tasks=("add_quant",),
        least_n=8193,
    ),
    ShortClass(
        "RMSNorm and an add beyond 8192 columns",
        "QuACK keeps a row in the shared memory of a cluster of programs, and reads x and residual once. Up to "
        "65,536 columns they are read twice here, the second time mostly from L2; longer ones once, by programs that "
        "exchange their sums through L2: 299 µs of 131072 and 81928 columns, 344 before. Tried: 8 to 25 tiles for each "
        "range, whole rows in registers on 32 warps among them, and from 32,769 columns on up to 22 of `spread`.",
        tasks=("add",),
        norm="rms",
        least_n=8193,
    ),
    ShortClass(
        "LayerNorm and an add beyond 8192 columns",
        "As with RMSNorm, but for QuACK, whose LayerNorm takes no add. One tile serves 16,385 to 32,768 columns,"
        " another 32,769 to 65,536: the fastest of the longest row took 387 µs of 20736 columns, and this takes "
        "270.",
        tasks=("add",),
        least_n=8193,
    ),
    ShortClass(
        "RMSNorm forward beyond 8192 columns",
        "QuACK's clusters again. Here rows up to 65,536 are read twice, and longer ones once, by programs that "
        "exchange their sums through L2 and wait for it. Tried: 3 and 4 stages, 2 to 8 warps, up to 8 chunks "
        "held.",
        tasks=("forward",),
        norm="rms",
        least_n=8193,
    ),
    ShortClass(
        "LayerNorm forward beyond 8192 columns",
        "Read twice up to 65,536 columns. A range has one tile: of 65,536 columns itself `spread` is 4 % faster,"
        " and 8 to 17 % slower of 36,864 to 53,248. Of 32,768 columns it took 204 µs, 187 read twice (H100).",
        tasks=("forward",),
        least_n=8193,
    ),
    ShortClass(
        "Up to 2048 rows of up to 512 columns",
        "Of the 5 to 8 µs that are measured, with L2 overwritten, the kernel by itself takes 1.7 to 3; a copy "
        "takes 5 to 6. Narrow chunks, which many rows have, take 2 to 40 % longer here. Tiles are the fastest of"
        " tune's for 512, 1024 and 2048 rows together.",
        most_n=512,
        many=False,
    ),
    ShortClass(
        "Up to 2048 rows of 513 to 8192 columns",
        "A wave of programs or less, each with a row. Tiles are the fastest of tune's at a range's longest row "
        "and a quarter up it, for 512, 1024 and 2048 rows together; one for each length and number of rows was "
        "not sought.",
        many=False,
    ),
    ShortClass(
        "Many rows of up to 512 columns",
        "RMSNorm and adds run at the copy's speed, as their peers do, within 3 %. LayerNorm takes 12 to 19 "
        "instructions a value, 17 to 35 before chunks were narrow. Chunks of 16 to 256 columns on 1 to 4 warps "
        "were timed at 20 lengths; a range has one such tile, and one for lengths that fill it.",
        most_n=512,
        many=True,
    ),
    ShortClass(
        "Many rows of 513 to 8192 columns",
        "At 0.93 to 1.03 of the copy's speed. Tiles are the fastest of 20 to 30 of tune's at a range's longest "
        "row and a quarter up it.",
        many=True,
    ),
)
