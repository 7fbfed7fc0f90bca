"""The comments in a table of tiles on the runs of `normforge tune` that measured the table: one per kind of run."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..codegen.emit import LINE_LENGTH
from ..codegen.instance import Bucket
from ..codegen.tiling import EVERY_CLASS, TileClass
from .tile_trials import Row

_CLASS_OF = {kind.name: kind for kind in EVERY_CLASS}
# Between words, where a comment may go on in the next line.
_SPACE = r"(?: |\n# )"
_RANGE = r"[0-9]+\.\.[0-9]*"
_ROWS = rf"(?:{'|'.join(_CLASS_OF)})(?:{_SPACE}{_RANGE})+"


def listed(rows: Iterable[Row]) -> str:
    """List rows of a table by class, adjacent rows as one: fwd_16bit 1..512 2049..3072, bwd_16bit 1.."""
    by_class: dict[TileClass, list[Bucket]] = {}
    for row in rows:
        by_class.setdefault(row.kind, []).append(row.bucket)
    return ", ".join(" ".join((kind.name, *map(str, _joined(buckets)))) for kind, buckets in by_class.items())


def add_remark(head: str, measured_on: str, row: Row) -> str:
    """Return the comments at a table's head, with a row added to the rows that were measured.

    Args:
        head: the comments so far.
        measured_on: the device and versions of the measurement. A remark that begins so is extended; others stay.
        row: the row that was measured.
    """
    words = _SPACE.join(map(re.escape, measured_on.split(" ")))
    match = re.search(rf"^# {words}:{_SPACE}({_ROWS}(?:,{_SPACE}{_ROWS})*)$", head, re.MULTILINE)
    rows = [row] if match is None else [*_read(match[1]), row]
    remark = textwrap.fill(
        f"{measured_on}: {listed(sorted(rows, key=lambda row: EVERY_CLASS.index(row.kind)))}",
        LINE_LENGTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    if match is None:
        return f"{head}\n{remark}".strip("\n")
    return f"{head[: match.start()]}{remark}{head[match.end() :]}"


def _read(text: str) -> Iterator[Row]:
    for words in (part.split() for part in text.replace("\n# ", " ").split(",")):
        for lengths in words[1:]:
            first, last = lengths.split("..")
            yield Row(_CLASS_OF[words[0]], Bucket("", int(first), int(last) if last else None))


def _joined(buckets: Iterable[Bucket]) -> list[Bucket]:
    joined: list[Bucket] = []
    for bucket in sorted(buckets, key=lambda bucket: bucket.first):
        before = joined[-1] if joined else None
        if before is None or (before.last is not None and bucket.first > before.last + 1):
            joined.append(bucket)
        elif before.last is not None:
            joined[-1] = replace(before, last=None if bucket.last is None else max(before.last, bucket.last))
    return joined
