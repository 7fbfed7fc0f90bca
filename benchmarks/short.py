"""The sweep's cells that miss a goal, by class: how many, by how much, their kernels, and what was tried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .errors import UsageError
from .reach import RULES, Rule, check
from .results import PROJECT, Results, Row, read
from .short_classes import CLASSES, ShortClass

# The suite whose goals are of a share of cells, and the file of `python -m benchmarks profile`.
SUITE, PROFILE = "sweep", "profile"

_COPY: Final = "of the copy's speed"
_PEER: Final = "of the best peer's"
_KERNELS = ("us", "registers", "spilled_bytes", "occupancy_percent")


@dataclass(frozen=True)
class Short:
    """A cell that misses a goal: its row, what the goal asks for, and the ratio that it came to."""

    row: Row
    of: str
    ratio: float


@dataclass(frozen=True)
class Kernel:
    """The kernel of a cell's call that takes longest, as it was profiled.

    Attributes:
        registers: of a thread.
        spilled: bytes of a thread that registers did not hold.
        occupancy: in percent.
    """

    registers: int
    spilled: int
    occupancy: int


def short_of(results: Results, rules: Iterable[Rule] = RULES) -> list[Short]:
    """Every cell of the suite that misses a goal, once for each ratio that goals ask for."""
    found: dict[tuple[str, str], Short] = {}
    for rule in rules:
        of, least = (_COPY, rule.copy) if rule.copy is not None else (_PEER, rule.peer)
        if rule.suite != SUITE or least is None:
            continue
        for finding in check(rule, results).findings:
            ratio = finding.to_copy if of is _COPY else finding.to_peer
            if not finding.met and ratio is not None:
                found.setdefault((finding.row.cell, of), Short(finding.row, of, ratio))
    return list(found.values())


def by_class(short: Iterable[Short], classes: Sequence[ShortClass] = CLASSES) -> dict[str, list[Short]]:
    """Return the short cells of each class, by title, in the order of classes.

    Raises:
        UsageError: a cell is of none.
    """
    sorted_out: dict[str, list[Short]] = {one.title: [] for one in classes}
    for each in short:
        title = next((one.title for one in classes if one.covers(each.row)), None)
        if title is None:
            raise UsageError(f"{each.row.cell} is of no class of benchmarks/short_classes.py; give it one")
        sorted_out[title].append(each)
    return {title: cells for title, cells in sorted_out.items() if cells}


def kernels_of(folder: Path) -> dict[str, Kernel]:
    """Return the longest kernel of each cell that was profiled.

    Raises:
        UsageError: there is no profile in the folder.
    """
    found = read(folder, PROFILE, ("suite", "cell", "provider", "status", *_KERNELS))
    if found is None:
        raise UsageError(
            f"{folder} has no {PROFILE}.csv; make it: python -m benchmarks profile --suite {SUITE} --out {folder} "
            "--only, and the cells that python -m benchmarks reach lists"
        )
    longest: dict[str, dict[str, str]] = {}
    for record in found[1]:
        is_ours = (record["suite"], record["provider"], record["status"]) == (SUITE, PROJECT, "ok")
        cell = record["cell"]
        if is_ours and (cell not in longest or float(record["us"]) > float(longest[cell]["us"])):
            longest[cell] = record
    return {
        cell: Kernel(int(one["registers"]), int(one["spilled_bytes"] or 0), int(one["occupancy_percent"]))
        for cell, one in longest.items()
    }


def render(short: Iterable[Short], kernels: dict[str, Kernel], classes: Sequence[ShortClass] = CLASSES) -> str:
    """Return a bullet for each class.

    Raises:
        UsageError: a cell is of no class, or was not profiled.
    """
    texts = {one.title: one.text for one in classes}
    return "\n".join(
        f"- **{title}**: {_extent(cells)}. {_profile([cell.row.cell for cell in cells], kernels)}. {texts[title]}"
        for title, cells in by_class(short, classes).items()
    )


def _extent(cells: Sequence[Short]) -> str:
    ratios = {of: [cell.ratio for cell in cells if cell.of == of] for of in (_COPY, _PEER)}
    said = [
        f"{len(some)} at {_span(round(min(some), 2), round(max(some), 2), '.2f')} {of}"
        for of, some in ratios.items()
        if some
    ]
    count = len({cell.row.cell for cell in cells})
    return f"{count} {'cell' if count == 1 else 'cells'}, {', '.join(said)}"


def _profile(cells: Iterable[str], kernels: dict[str, Kernel]) -> str:
    unique = sorted(set(cells))
    lacking = [cell for cell in unique if cell not in kernels]
    if lacking:
        raise UsageError(f"{', '.join(lacking)} fell short and was not profiled; profile the cells that reach lists")
    found = [kernels[cell] for cell in unique]
    registers = [one.registers for one in found]
    occupancy = [one.occupancy for one in found]
    spilled = [one.spilled for one in found if one.spilled]
    spills = f"{len(spilled)} of {len(found)} spill up to {max(spilled)} bytes" if spilled else "none spills"
    return (
        f"{_span(min(registers), max(registers))} registers a thread, {spills}, occupancy "
        f"{_span(min(occupancy), max(occupancy))} %"
    )


def _span(least: float, most: float, form: str = "") -> str:
    return f"{least:{form}}" if least == most else f"{least:{form}} to {most:{form}}"
