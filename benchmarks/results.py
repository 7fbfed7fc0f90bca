"""The results of one suite as files: a CSV to look at and to resume from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from normforge.codegen.locking import replace_file

from . import tables
from .cells import Cell
from .errors import UsageError
from .timing import Spread

OK = "ok"
# The two providers that are not peers.
PROJECT, CEILING = "normforge", "copy"
# The entry of a header with the seed of a suite's cells.
SEED = "seed"
R = TypeVar("R")
_TYPES: Mapping[str, type[str] | type[int] | type[float]] = {"str": str, "int": int, "float": float}


@dataclass(frozen=True)
class Row:
    """One provider on one cell.

    Attributes:
        cell: the cell's id.
        group: the part of the suite that it belongs to.
        task: what was computed; the next four are the cell's too.
        kind: norm, dtypes and quantisation in one word.
        norm: `ln` or `rms`.
        m: rows.
        n: columns.
        bytes: bytes that have to be moved.
        copy_bytes: bytes that a copy of x moves.
        provider: its name.
        status: `ok`, or `fails: ` and the first line of why.
        us: the median time of a call in microseconds, 0 where there is none.
        us_p20: its 20th percentile.
        us_p80: its 80th.
        runs: how many calls (or replays) were timed.
        gb_per_s: bytes over the median time.
    """

    cell: str
    group: str
    task: str
    kind: str
    norm: str
    m: int
    n: int
    bytes: int
    copy_bytes: int
    provider: str
    status: str
    us: float = 0.0
    us_p20: float = 0.0
    us_p80: float = 0.0
    runs: int = 0
    gb_per_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Return True if there is a time."""
        return self.status == OK


def make_row(cell: Cell, provider: str, status: str, spread: Spread | None = None) -> Row:
    """Return a row of a cell; a ceiling's bytes are those of the copy."""
    moved = cell.copy_bytes if provider == CEILING else cell.bytes_moved
    about = (cell.id, cell.group, cell.task.value, cell.kind, cell.norm.value, cell.m, cell.n, moved, cell.copy_bytes)
    if spread is None:
        return Row(*about, provider, status)
    return Row(
        *about,
        provider,
        status,
        us=round(spread.median, 3),
        us_p20=round(spread.p20, 3),
        us_p80=round(spread.p80, 3),
        runs=spread.runs,
        gb_per_s=round(moved / spread.median / 1e3, 1),
    )


@dataclass
class Results:
    """A suite's rows, in the order they were measured, under the header they share."""

    suite: str
    header: dict[str, str]
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    _by_cell: dict[str, dict[str, Row]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._by_cell = {}
        for row in self.rows.values():
            self._by_cell.setdefault(row.cell, {})[row.provider] = row

    def add(self, row: Row) -> None:
        """Add a row, in place of an earlier one of the same cell and provider."""
        self.rows[row.cell, row.provider] = row
        self._by_cell.setdefault(row.cell, {})[row.provider] = row

    def of(self, cell: str) -> dict[str, Row]:
        """Return a cell's rows by provider."""
        return dict(self._by_cell.get(cell, {}))

    def cells(self) -> Iterator[str]:
        """Return the cells, each once."""
        yield from dict.fromkeys(cell for cell, _ in self.rows)

    @property
    def seed(self) -> int | None:
        """Return the seed of the suite's cells; None if they are not drawn."""
        return int(self.header[SEED]) if SEED in self.header else None

    def ratio_to_copy(self, row: Row) -> float | None:
        """Return a row's throughput over that of the copy of x in its cell, or None if either is missing."""
        ceiling = self.rows.get((row.cell, CEILING))
        if ceiling is None or not ceiling.ok or not row.ok:
            return None
        return (row.bytes / row.us) / (ceiling.bytes / ceiling.us)

    def save(self, folder: Path) -> None:
        """Write `<suite>.csv`; a reader finds the old file or the new one, never half of one."""
        records = [asdict(row) | {"ratio_to_copy": _rounded(self.ratio_to_copy(row))} for row in self.rows.values()]
        write(folder, self.suite, self.header, [*_columns(Row), "ratio_to_copy"], records)


def write(
    folder: Path, suite: str, header: Mapping[str, str], columns: Collection[str], records: Iterable[Mapping[str, Any]]
) -> None:
    """Write records under a header as `<suite>.csv`, as `Results.save` does."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file((folder / f"{suite}.csv").resolve(), tables.text(header, columns, records))


def save_rows(folder: Path, suite: str, header: Mapping[str, str], kind: type, rows: Iterable[Any]) -> None:
    """Write rows of a dataclass, a column per field, as `write` does."""
    write(folder, suite, header, _columns(kind), [asdict(row) for row in rows])


def load_rows(folder: Path, suite: str, kind: type[R]) -> tuple[dict[str, str], list[R]] | None:
    """Read the header and the rows of a dataclass, each text as its field's type; None where there is no file.

    Raises:
        UsageError: the file lacks one of the fields.
    """
    found = read(folder, suite, _columns(kind))
    if found is None:
        return None
    types = _columns(kind)
    return found[0], [kind(**{name: _value(types[name], record[name]) for name in types}) for record in found[1]]


def _columns(kind: Any) -> dict[str, str]:
    """Return the types of a dataclass's fields, by name."""
    return {column.name: str(column.type) for column in fields(kind)}


def _value(kind: str, text: str) -> Any:
    """Return a text of a file as a field's type."""
    optional = kind.endswith(" | None")
    return None if optional and not text else _TYPES[kind.removesuffix(" | None")](text)


def load(folder: Path, suite: str) -> Results | None:
    """Read a suite's CSV, or None where there is none.

    Raises:
        UsageError: the file is not one that `Results.save` wrote.
    """
    found = load_rows(folder, suite, Row)
    if found is None:
        return None
    return Results(suite, found[0], {(row.cell, row.provider): row for row in found[1]})


def read(folder: Path, suite: str, columns: Collection[str]) -> tuple[dict[str, str], list[dict[str, str]]] | None:
    """Read what `write` wrote: the header, and the records as text; None where there is no file.

    Raises:
        UsageError: the file lacks one of the columns.
    """
    path = folder / f"{suite}.csv"
    if not path.exists():
        return None
    header, names, records = tables.parse(path.read_text())
    if not set(columns) <= set(names):
        raise UsageError(f"{path} lacks the columns of a results file; move it away, or name another folder with --out")
    return header, records


def require_header(path: Path, found: Mapping[str, str], header: Mapping[str, str]) -> None:
    """Refuse to go on with a file that was measured with something else.

    Raises:
        UsageError: the headers differ.
    """
    keys = [key for key in {**found, **header} if found.get(key) != header.get(key)]
    if keys:
        differing = "; ".join(f"{key} {found.get(key, 'none')} there, {header.get(key, 'none')} now" for key in keys)
        raise UsageError(
            f"{path} was measured with something else ({differing}); pass --fresh to begin it anew, or another --out"
        )


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 4)
