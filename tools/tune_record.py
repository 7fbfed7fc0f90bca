"""The record of `normforge tune`, written row by row: winners in a table, every time in a report beside the table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..codegen import tile_tables
from ..codegen.errors import TileTableError
from ..codegen.instance import Bucket, Tiles
from ..codegen.locking import locked, replace_file
from ..codegen.tile_tables import REQUIRED_SIZES, TileTable, lean, serves, tile_words, tiles_by_size
from .environment import NOT_KNOWN
from .tile_trials import Outcome, Row, Tried
from .tune_remark import add_remark, listed

# The format of a report's line; a line of another format is refused.
_FORMAT = 1
_ENDING = ".jsonl"


@dataclass(frozen=True)
class Resumed:
    """Rows that need no second measurement, and why other recorded rows do.

    Attributes:
        kept: rows that were measured by a run like this one.
        again: sentences on the others.
    """

    kept: tuple[Row, ...]
    again: tuple[str, ...]


class Record:
    """A table, a report, or both, which other processes may be adding to at the same time."""

    def __init__(self, table: Path | None, report: Path | None, environment: Mapping[str, str]) -> None:
        """Read what is there, and see that more can be written, before anything is measured.

        Args:
            table: the table of tiles to write, if any.
            report: where every time goes; by default beside the table.
            environment: with what is measured. Rows of another are not taken for this one's.

        Raises:
            TileTableError: a file cannot be read or written, or the report is something else.
        """
        if report is None:
            if table is None:
                raise ValueError("a record is a table, a report, or both")
            report = table.with_suffix(_ENDING)
        self.table, self.report = table, report
        self._environment = dict(environment)
        self.has_written = False
        with self._writing():
            self._lines()
            self._rows_of_table()
            if self.table is not None and self.table.exists():
                tile_tables.read_head(self.table)

    def resume(self, asked: Iterable[Row]) -> Resumed:
        """Which of some rows were measured with what is here, and stand in the table as they were measured.

        Raises:
            TileTableError: a file cannot be read.
        """
        table = self._rows_of_table()
        lines = {_key_of(line): line for line in self._lines()}
        kept, changed, elsewhere = [], [], dict[str, list[Row]]()
        for row in asked:
            line = lines.get(_key(row))
            if line is None or line["tiles"] is None or not {size.value for size in row.sizes} <= _sizes(line):
                continue
            if line["environment"] != self._environment:
                elsewhere.setdefault(self._difference(line["environment"]), []).append(row)
            elif self.table is not None and table.get(_key(row)) != line["tiles"]:
                changed.append(row)
            else:
                kept.append(row)
        again = [f"measured again: {listed(rows)}, measured before with {why}" for why, rows in elsewhere.items()]
        if changed:
            again.append(f"measured again: {listed(changed)}, of which {self.table} has other tiles than {self.report}")
        return Resumed(tuple(kept), tuple(again))

    def add(self, row: Row, outcomes: Sequence[Outcome]) -> None:
        """Write a row: into the table if it has both its tiles, and into the report in any case.

        Where a process ends between the two, the row is in the table alone, and is measured again.

        Args:
            row: what was measured.
            outcomes: of its cases.

        Raises:
            TileTableError: a file cannot be written, or was made unreadable meanwhile.
        """
        won = winners(row, outcomes)
        with self._writing():
            if self.table is not None and won is not None:
                self._write_table(self.table, row, won)
            lines = self._lines()
            # The cases of other sizes that an earlier run of the same kind wrote.
            alike = (old for old in lines if _key_of(old) == _key(row) and old["environment"] == self._environment)
            measured = {size.value for size in row.sizes}
            before = [case for old in alike for case in old["cases"] if case["for"] not in measured]
            line = {
                "format": _FORMAT,
                "environment": self._environment,
                "class": row.kind.name,
                "first": row.bucket.first,
                "last": row.bucket.last,
                "tiles": None if won is None else _words(won),
                "cases": [*before, *map(_case, outcomes)],
            }
            kept = [old for old in lines if not _overlap(old, row)]
            replace_file(self.report.resolve(), "".join(f"{json.dumps(each)}\n" for each in (*kept, line)))

    def _write_table(self, path: Path, row: Row, won: Tiles) -> None:
        old, head = TileTable({}), ""
        if path.exists():
            old, head = tile_tables.read_table(path), tile_tables.read_head(path)
        table = tile_tables.merge(old, TileTable({row.kind: ((row.bucket, won),)}))
        replace_file(path.resolve(), tile_tables.write_table(table, add_remark(head, self._measured_on(row), row)))
        self.has_written = True

    def _measured_on(self, row: Row) -> str:
        there = self._environment
        known = there["revision"] != NOT_KNOWN
        version = f"revision {there['revision']}" if known else f"normforge {there['normforge']}"
        versions = f"torch {there['torch']}, Triton {there['triton']}, {version}"
        sizes = "" if row.kept is None else f", {' and '.join(size.value for size in row.sizes)} alone"
        return f"Measured by normforge tune on {there['device']}: {versions}{sizes}"

    def _difference(self, environment: Mapping[str, str]) -> str:
        names = dict.fromkeys((*self._environment, *environment))
        pairs = [(name, environment.get(name, "none"), self._environment.get(name, "none")) for name in names]
        return ", ".join(f"{name} {theirs} (here {mine})" for name, theirs, mine in pairs if theirs != mine)

    def held(self, asked: Iterable[Row]) -> list[Row]:
        """Return the table's rows that serve the longest row lengths asked for, each once, with the tiles to keep."""
        found = dict[Row, None]()
        table = self._read_table()
        for row in asked:
            for bucket, tiles in table.rows.get(row.kind, ()):
                if serves(bucket, row.bucket):
                    found[replace(row, bucket=bucket, kept=tiles)] = None
        return list(found)

    def _read_table(self) -> TileTable:
        if self.table is None or not self.table.exists():
            return TileTable({})
        return tile_tables.read_table(self.table)

    def _rows_of_table(self) -> dict[tuple[str, int, int | None], dict[str, Any]]:
        rows = self._read_table().rows
        return {_key(Row(kind, bucket)): _words(tiles) for kind, own in rows.items() for bucket, tiles in own}

    def _lines(self) -> list[dict[str, Any]]:
        try:
            text = self.report.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise TileTableError(f"{self.report} cannot be read: {error}; name another with --report FILE") from error
        return [self._line(at, line) for at, line in enumerate(text.splitlines(), 1)]

    def _line(self, at: int, text: str) -> dict[str, Any]:
        try:
            line = json.loads(text)
            fits = (
                line["format"] == _FORMAT
                and isinstance(line["class"], str)
                and isinstance(line["environment"], dict)
                and isinstance(line["first"], int)
                and isinstance(line["last"], int | None)
                and isinstance(line["tiles"], dict | None)
                and all(isinstance(case["for"], str) for case in line["cases"])
            )
        except (ValueError, LookupError, TypeError):
            fits = False
        if not fits:
            raise TileTableError(
                f"{self.report}:{at}: this is no line of a report that normforge tune of this version writes; "
                "move the file elsewhere, or name another with --report FILE"
            )
        return dict(line)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Lock both files against other writers."""
        try:
            for path in filter(None, (self.report, self.table)):
                path.parent.mkdir(parents=True, exist_ok=True)
            with locked(_lock(self.report)), nullcontext() if self.table is None else locked(_lock(self.table)):
                yield
        except TileTableError:
            raise
        except OSError as error:
            raise TileTableError(
                f"{self.table or self.report} cannot be written: {error.strerror} ({error.filename}); "
                "mend that and run again, or name another file"
            ) from error


def winners(row: Row, outcomes: Sequence[Outcome]) -> Tiles | None:
    """Return the tiles of a row from the outcomes of its cases; None without a tile for many or for few rows."""
    tiles = {} if row.kept is None else tiles_by_size(row.kept)
    tiles |= {outcome.case.size.value: outcome.winner.tile for outcome in outcomes if outcome.winner is not None}
    if not tiles.keys() >= REQUIRED_SIZES:
        return None
    return lean(Tiles(**tiles))


def _lock(path: Path) -> Path:
    path = path.resolve()
    return path.with_name(f".{path.name}.lock")


def _key_of(line: Mapping[str, Any]) -> tuple[str, int, int | None]:
    return line["class"], line["first"], line["last"]


def _sizes(line: Mapping[str, Any]) -> set[str]:
    return {case["for"] for case in line["cases"]}


def _key(row: Row) -> tuple[str, int, int | None]:
    return row.kind.name, row.bucket.first, row.bucket.last


def _overlap(line: Mapping[str, Any], row: Row) -> bool:
    return line["class"] == row.kind.name and tile_tables.overlap(Bucket("", line["first"], line["last"]), row.bucket)


def _words(tiles: Tiles) -> dict[str, Any]:
    return {size: tile_words(tile) for size, tile in tiles_by_size(tiles).items()}


def _case(outcome: Outcome) -> dict[str, Any]:
    won = outcome.winner
    return {
        "for": outcome.case.size.value,
        "mode": outcome.case.mode.name,
        "m": outcome.rows,
        "n": outcome.case.lengths,
        "present": tile_words(outcome.present),
        "best": None if won is None else tile_words(won.tile),
        "gb_per_s": None if won is None else round(won.gb_per_s, 1),
        "candidates": [_candidate(tried) for tried in outcome.tried],
    }


def _candidate(tried: Tried) -> dict[str, Any]:
    times = {"us": tried.ms, "final_us": tried.final_ms, "few_us": tried.few_ms}
    microseconds = {name: round(ms * 1e3, 3) for name, ms in times.items() if ms is not None}
    return {"tile": tile_words(tried.tile), **microseconds, **({"problem": tried.problem} if tried.problem else {})}
