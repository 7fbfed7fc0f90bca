"""Read the output of compute-sanitizer and of the process that it watches."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .worker import BROKEN, DONE, STARTS

# `=========` starts each line of the tool's; a report's first line is indented by one space, what follows by more.
_HEAD = re.compile(r"^={9} (?! )(.+)$")
_DETAIL = re.compile(r"^={9}  +(.+)$")
_OURS = re.compile(r"\b((?:ln|rms)_(?:fwd|bwd)_\w+|sum_partials)\b")
_SUMMARY = re.compile(r"SUMMARY: (\d+)")
# What the tool says of itself.
_REMARKS = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "This tool is deprecated")
# Calls of CUDA's API that return an error: torch asks for what a driver may not have. Where a launch of ours fails,
# the call raises, and the log says so.
_API = "Program hit"
# The tool's own failures, which no kernel's name goes with.
_FATAL = ("Error: No attachable process", "Error: process didn't terminate", "Internal Sanitizer Error", "Target app")


@dataclass(frozen=True)
class Report:
    """One thing that the tool found.

    Attributes:
        cell: the call that was being made; "" ahead of the first.
        what: the tool's words.
        where: the line that names the kernel, or "".
        ours: whether it counts: what a kernel of another library does is not ours to mend, and is only counted.
    """

    cell: str
    what: str
    where: str
    ours: bool


@dataclass
class Log:
    """The output of one process.

    Attributes:
        cells: the calls that were made.
        reports: what the tool found, in order.
        broken: calls that failed, and why.
        ended: whether all calls of the process were made.
        summed_up: whether the tool came to its end, and told a sum.
    """

    cells: list[str] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    ended: bool = False
    summed_up: bool = False

    @property
    def errors(self) -> list[Report]:
        """The reports that count."""
        return [report for report in self.reports if report.ours]

    @property
    def complete(self) -> bool:
        """Return True if nothing was left unwatched."""
        return self.ended and self.summed_up


def read(text: str) -> Log:
    """Read what a process printed, the tool's lines among its own."""
    log, cell = Log(), ""
    # The tool's reports: the call, the first line, and the lines that belong to it; None between two.
    blocks: list[tuple[str, str, list[str]]] = []
    details: list[str] | None = None
    for line in text.splitlines():
        started, more = _HEAD.match(line), _DETAIL.match(line)
        rest = line.partition(": ")[2]
        if started:
            details = []
            blocks.append((cell, started[1], details))
        elif more and details is not None:
            details.append(more[1])
        elif line.startswith((STARTS, BROKEN, DONE)):
            details = None
            if line.startswith(STARTS):
                cell = rest
                log.cells.append(cell)
            elif line.startswith(BROKEN):
                log.broken.append(f"{cell}: {rest}")
            else:
                log.ended = True
    for during, head, lines in blocks:
        if head.startswith(_REMARKS):
            log.summed_up |= _SUMMARY.search(head) is not None
        elif not head.startswith(_API):
            log.reports.append(_report(head, lines, during))
    return log


def _report(head: str, details: list[str], cell: str) -> Report:
    lines = [head, *details]
    named = next((line for line in lines if _OURS.search(line)), "")
    where = named or next((line for line in details if line.startswith(("at ", "by ", "and "))), "")
    # A kernel's name is behind "at"; the host's frames behind it may name functions of anybody's.
    is_kernels = any(line.startswith("at ") or " access at " in line for line in lines)
    return Report(cell, head, where, ours=bool(named) or not is_kernels or head.startswith(_FATAL))
