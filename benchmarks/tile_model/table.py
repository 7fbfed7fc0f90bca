"""The model's table: its files, what is wrong with a tile by it, and how well it says what an H200 was timed at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from math import inf
from pathlib import Path
from statistics import median

from tabulate import tabulate

from ..chosen import RESULTS
from ..errors import UsageError
from ..results import PROJECT, load_rows, read, save_rows
from ..results import load as load_results
from .devices import DEVICES
from .model import MANY, MEASURED, RULE, TABLE, TIMED_KINDS, Row

NAME = "tiles"
FOLDER, TIMED = RESULTS / "tile-model", RESULTS / "h200"
_SIZE = "256 MiB"

# A kernel is good that reaches `GOOD` of the copy's speed. Of an H200's own tiles none that does has less than 2.17
# times in flight what Little's law needs: see `calibrate`.
GOOD = 0.92
LEAST_MARGIN = 2.0
# Below it fewer are good than are not.
_PLENTY = 4

SPILLS, NONE_FITS, TOO_LITTLE = "spills", "none fits", "too little in flight"


@dataclass(frozen=True)
class Known:
    """Rows that are known to be short of something, and why they are left so.

    Attributes:
        fault: `SPILLS`, `NONE_FITS` or `TOO_LITTLE`.
        arch: a shell pattern, as are the others.
        kernel: of its name.
        tile: of the tile's words.
        reason: why.
        most: bytes that they spill at most.
    """

    fault: str
    arch: str
    kernel: str
    tile: str
    reason: str
    most: int = 0

    def __str__(self) -> str:
        most = f", {self.most} bytes at most" if self.most else ""
        return f"`{self.kernel}` on {self.arch}, tiles `{self.tile}`: {self.fault}{most}; {self.reason}."

    def covers(self, row: Row, fault: str) -> bool:
        """Return True if the entry covers this row."""
        return (
            fault == self.fault
            and fnmatchcase(row.arch, self.arch)
            and fnmatchcase(row.kernel, self.kernel)
            and fnmatchcase(row.tile, self.tile)
            and (fault != SPILLS or row.spilled_bytes <= self.most)
        )


_LITTLE = "a few registers too many"
_STORED = "the sum is rounded as it is stored before its statistics"
# None is mended in the rule, which is for every architecture, before a card says by how much it is slower.
KNOWN = (
    Known(
        SPILLS,
        "sm_*",
        "*_bwd_fp32_*",
        "*",
        "a row of x and of dy, the next of each and a thread's sums of two gradients are fp32, and of N = 5120 it has "
        "20 values of each in 128 registers; fewer programs or values leave less in flight, and no fp32 tile was tuned "
        "backward",
        most=272,
    ),
    Known(
        SPILLS,
        "sm_*",
        "ln_bwd_bf16_one_pass",
        "one_pass 1 1024 8 2",
        "an H200 takes two programs of 128 registers over one of 168 by 15 %",
        most=48,
    ),
    Known(SPILLS, "sm_*", "ln_bwd_bf16_rows", "rows 8 128 2 8", _LITTLE, most=8),
    Known(
        SPILLS,
        "sm_*",
        "ln_fwd_*_one_pass",
        "one_pass 1 [48]* 32",
        "a few long rows are held whole in the 64 registers that 32 warps leave a thread",
        most=56,
    ),
    Known(SPILLS, "sm_[89]0", "ln_fwd_fp32_one_pass", "one_pass 1 1024 8", _LITTLE, most=8),
    Known(SPILLS, "sm_90", "rms_fwd_bf16_int8_addst_dq_two_pass", "two_pass 1 8192 32", _STORED, most=8),
    Known(SPILLS, "sm_100", "rms_fwd_bf16_int8_addst_dq_one_pass", "one_pass 1 8192 32", _STORED, most=8),
    Known(SPILLS, "sm_90", "ln_fwd_bf16_addst_one_pass", "one_pass 1 4096 16", _STORED, most=8),
    Known(SPILLS, "sm_[89]0", "rms_fwd_bf16_addst_two_pass", "two_pass 1 16384 32", _STORED, most=48),
    Known(
        SPILLS,
        "sm_*",
        "ln_fwd_bf16_addst_two_pass",
        "two_pass 1 16384 32",
        "eight chunks side by side; an H200 spills 312 bytes of 114792 columns, and takes 375 us, 390 with one by one",
        most=232,
    ),
    Known(SPILLS, "gfx942", "ln_fwd_fp32_int8_addst_dq_two_pass", "two_pass 1 4096 32", _LITTLE, most=24),
    Known(
        TOO_LITTLE,
        "sm_90",
        "rms_bwd_bf16_two_pass",
        "two_pass 2 2048 8 2",
        "its own table has `spread` there, by tuning",
    ),
    Known(
        TOO_LITTLE,
        "sm_100",
        "*_bwd_bf16_*",
        "*",
        "a B200's memory wants half as much again as an H200's, of whose own tiles those for N from 512 to 32768 would "
        "have 2.4 to 5.1; a table for sm_100 would begin with them",
    ),
)


def faults(row: Row) -> list[str]:
    """Return what is wrong with a tile, by the model: few rows fill no GPU, whatever they load at once."""
    found = [SPILLS] if row.spilled_bytes else []
    found += [] if row.resident else [NONE_FITS]
    return [*found, *([TOO_LITTLE] if row.rows == MANY and row.margin < LEAST_MARGIN else [])]


def unknown(rows: Iterable[Row]) -> list[tuple[Row, str]]:
    """Return what is wrong with the rule's tiles and listed nowhere."""
    return [
        (row, fault)
        for row in rows
        if row.tiles == RULE
        for fault in faults(row)
        if not any(known.covers(row, fault) for known in KNOWN)
    ]


def outlived(rows: Sequence[Row]) -> list[Known]:
    """Return what is listed and matches no row any more."""
    wrong = [(row, fault) for row in rows if row.tiles == RULE for fault in faults(row)]
    return [known for known in KNOWN if not any(known.covers(row, fault) for row, fault in wrong)]


def save(folder: Path, header: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Write `tiles.csv`."""
    save_rows(folder, NAME, header, Row, rows)


def load(folder: Path) -> tuple[dict[str, str], list[Row]] | None:
    """Read what `save` wrote; None where there is none."""
    return load_rows(folder, NAME, Row)


@dataclass(frozen=True)
class Calibration:
    """The model of an H200's own tiles beside what they were timed at, with many rows.

    Attributes:
        cells: how many there are, by margin, the least first: the margin and the share of copy's speed.
    """

    cells: tuple[tuple[float, float], ...]

    def good(self, least: float = 0.0, most: float = inf) -> list[float]:
        """Return the margins of rows that reach `GOOD`, from one margin to below another."""
        return [margin for margin, share in self.cells if share >= GOOD and least <= margin < most]

    def below(self, most: float) -> int:
        """How many have a margin below one."""
        return sum(margin < most for margin, _ in self.cells)

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of margins and shares."""
        margins, shares = zip(*self.cells, strict=True)
        one, other = _ranks(margins), _ranks(shares)
        middle = (len(one) - 1) / 2
        above = sum((a - middle) * (b - middle) for a, b in zip(one, other, strict=True))
        below = (sum((a - middle) ** 2 for a in one) * sum((b - middle) ** 2 for b in other)) ** 0.5
        return float(above / below)

    def __str__(self) -> str:
        below, cells = self.below(_PLENTY), len(self.cells)
        return (
            f"Of {cells} cells timed on an H200 with the kernels modelled, {len(self.good())} reach {GOOD} of the "
            f"copy's speed, none with a margin below {min(self.good()):.2f}. With one below {_PLENTY} they are "
            f"{len(self.good(most=_PLENTY))} of {below}, from there on {len(self.good(_PLENTY))} of {cells - below}; "
            f"margins and shares of the copy's speed have a rank correlation of {self.rank_correlation:.2f}."
        )


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def calibrate(rows: Iterable[Row], timed_at: Path = TIMED) -> Calibration:
    """Join the table's tiles with times of the same kernels; what was timed with an older tile is left out.

    Raises:
        UsageError: the folder lacks one of those suites, or their profile.
    """
    timed = {name: load_results(timed_at, name) for name in TIMED_KINDS}
    profiled = read(timed_at, "profile", ("cell", "kernel", "threads"))
    if profiled is None or None in timed.values():
        raise UsageError(f"{timed_at} lacks {', '.join(TIMED_KINDS)} or profile, which the model is held against")
    launched = {(line["cell"], line["kernel"], line["threads"]) for line in profiled[1]}
    modelled: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row.tiles == TABLE and row.arch == MEASURED:
            modelled[row.kind, f"{row.norm}_{row.dtype}", row.n].append(row)
    found = []
    for results in timed.values():
        assert results is not None
        for cell in results.rows.values():
            own = modelled[cell.task, cell.kind, cell.n] if cell.provider == PROJECT and cell.group == _SIZE else []
            share = results.ratio_to_copy(cell)
            if own and share and all((cell.cell, row.kernel, str(row.threads)) in launched for row in own):
                found.append((min(row.margin for row in own), share))
    return Calibration(tuple(sorted(found)))


def describe(header: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Return the summary of a table: its versions, `render`, what is listed, and the calibration."""
    made = f"Modelled for {header['devices']}, with Triton {header['triton']}, revision {header['revision']}."
    listed = "\n".join(f"- {known}" for known in KNOWN)
    return "\n\n".join(filter(None, (made, render(rows), listed, str(calibrate(rows)))))


def render(rows: Sequence[Row]) -> str:
    """Return a line per GPU and kind of call, as Markdown: what fits, spills and is in flight with the rule's tiles."""
    lines = []
    own = [row for row in rows if row.tiles == RULE]
    for (arch, kind), group in groupby(own, lambda row: (row.arch, row.kind)):
        listed = list(group)
        many = [row for row in listed if row.rows == MANY]
        least = min(many, key=lambda row: row.margin)
        spilling = {row.kernel for row in listed if row.spilled_bytes}
        lines.append(
            (
                f"{arch} ({DEVICES[arch].name})",
                kind.replace("_", " + "),
                len(listed),
                len(spilling),
                max(row.spilled_bytes for row in listed),
                min(row.resident for row in listed),
                f"{median(row.margin for row in many):.1f}",
                f"{least.margin:.2f}",
                f"{least.kernel}, {least.n}: {least.tile}",
            )
        )
    headers = ["GPU", "call", "kernels", "that spill", "most spilled, B", "fewest programs", "margin, median"]
    headers += ["least", "of"]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)
