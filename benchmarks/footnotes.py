"""Footnotes of tables: which version of a peer failed or fell far below itself, and why where that is known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from .provider import Provider
from .results import CEILING, PROJECT, Row

# Shares are of a cell's fastest peer's speed. A peer is far below itself where its share is less than this of its best.
_FAR = 1 / 3
_HOW_WRONG = re.compile(r" by \S+ times its tolerance")
# Text that differs between failures of one kind.
_NUMBER = re.compile(r"\d+")
_SMALL = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class _Reason:
    """Why a peer does so, where it was found out.

    Attributes:
        provider: its name.
        status: a shell pattern of a row's status.
        cells: one of cell ids.
        text: the reason.
    """

    provider: str
    status: str
    cells: str
    text: str


_REASONS = (
    _Reason("liger", "*recommended Triton blocksize*", "*", "a program of it holds a whole row"),
    _Reason("liger", "*illegal memory access*", "*_h*of*", "it takes rows to adjoin"),
    _Reason("liger", "*view size is not compatible*", "*_h*of*", "it takes rows to adjoin"),
    _Reason("quack", "*could not build valid IR*", "*", "it copies gcd(N, 8) elements at once, one of an odd N"),
    _Reason(
        "quack",
        "ok",
        "forward/ln_*",
        "so at some lengths and not at others between (at 3072, not at 4096); why is not known",
    ),
)


def footnotes(
    cells: Sequence[Mapping[str, Row]], providers: Mapping[str, Provider], header: Mapping[str, str]
) -> tuple[dict[tuple[str, str], str], list[str]]:
    """Return the notes on a table's figures.

    Args:
        cells: of a table, each with its rows by provider.
        providers: those that are shown.
        header: of the results, for versions.

    Returns:
        The marks, by cell and provider, and their notes.
    """
    shares = [_shares(rows) for rows in cells]
    best: dict[tuple[str, str], float] = {}
    for rows, share in zip(cells, shares, strict=True):
        for name, value in share.items():
            best[name, rows[name].task] = max(value, best.get((name, rows[name].task), 0.0))
    marks: dict[tuple[str, str], str] = {}
    numbers: dict[str, str] = {}
    for rows, share in zip(cells, shares, strict=True):
        for name, provider in providers.items():
            row = rows.get(name)
            # No share is above 1, so what is far below a peer's best is far below the fastest peer too.
            far = name in share and share[name] < _FAR * best[name, rows[name].task]
            if row is None or (row.ok and not (far and _package(provider) in header)):
                continue
            note = f"{_versioned(provider, header)}: {_what(row)}{_why(row)}."
            marks[row.cell, name] = numbers.setdefault(note, str(len(numbers) + 1).translate(_SMALL))
    return marks, [f"{number} {note}" for note, number in numbers.items()]


def failures(rows: Iterable[Row], providers: Mapping[str, Provider], header: Mapping[str, str]) -> list[str]:
    """Return a sentence on each way in which a peer fails; cells of one size count as one.

    Args:
        rows: of a suite.
        providers: peers to speak of.
        header: of the results, for versions.
    """
    alike: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if not row.ok and row.provider in providers:
            alike.setdefault((row.provider, _NUMBER.sub("", row.status)), []).append(row)
    said = []
    for (name, _), failed in alike.items():
        first = min(failed, key=lambda row: (row.n, row.cell))
        span = sorted({row.n for row in failed})
        lengths = f"N = {span[0]}" if len(span) == 1 else f"N from {span[0]} to {span[-1]}"
        cells = "cell" if len(failed) == 1 else "cells"
        about = f"{_versioned(providers[name], header)} fails in {len(failed)} {cells}, {lengths}"
        said.append(f"{about}: {_what(first)}{_why(first)}.")
    return said


def _shares(rows: Mapping[str, Row]) -> dict[str, float]:
    """Return the share of the fastest peer's speed, for each timed peer of a cell."""
    timed = {name: row for name, row in rows.items() if row.ok and name not in (PROJECT, CEILING)}
    least = min((row.us for row in timed.values()), default=0.0)
    return {name: least / row.us for name, row in timed.items()}


def _versioned(provider: Provider, header: Mapping[str, str]) -> str:
    package = _package(provider)
    if package not in header:
        return provider.label
    stated = f"{package} {header[package]}"
    return stated if package == provider.label else f"{provider.label} ({stated})"


def _package(provider: Provider) -> str:
    """Return the package whose version a header states; steps, which have none, are this project's own."""
    return provider.distribution or provider.modules[0].partition(".")[0]


def _what(row: Row) -> str:
    if row.ok:
        return "under a third of the fastest peer's speed; in other lines it is more than three times as near"
    # How wrong differs from line to line.
    return f"`{_HOW_WRONG.sub('', row.status.removeprefix('fails: ')).rstrip('.')}`"


def _why(row: Row) -> str:
    found = (
        reason.text
        for reason in _REASONS
        if reason.provider == row.provider and fnmatch(row.status, reason.status) and fnmatch(row.cell, reason.cells)
    )
    text = next(found, "")
    return f"; {text}" if text else ""
