"""Files that a long command writes: the full table as CSV, and a summary of the table in a page of docs/.

Imports nothing beyond Python, because `proving matrix` runs before there is an environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks import tables
from benchmarks.pages import put_into

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
TABLES = Path("benchmarks/results/evidence")
EVIDENCE = Path("docs/reference/evidence.md")


@dataclass(frozen=True)
class Table:
    """A table of what a command found, as text.

    Attributes:
        header: device, versions, revision, and other facts that hold for all rows.
        columns: the names of the columns.
        rows: the rows.
    """

    header: Mapping[str, str]
    columns: Sequence[str]
    rows: Sequence[Mapping[str, str]]

    @classmethod
    def of(cls, header: Mapping[str, str], columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
        """Return a table whose rows are values in the order of the columns."""
        return cls(header, columns, [dict(zip(columns, map(str, row), strict=True)) for row in rows])

    @property
    def where(self) -> str:
        """A sentence that names the device, the versions and the revision."""
        return f"Run on {', '.join(f'{name} {value}' for name, value in self.header.items())}."


def parser_of(what: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a proof that records, with --record and --revision."""
    parser = argparse.ArgumentParser(
        prog=f"python -m proving {what}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter if epilog else argparse.HelpFormatter,
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FOLDER",
        help=f"a checkout, '.' say: write the table to its {TABLES}/ and the summary into its page of docs/",
    )
    parser.add_argument("--revision", help="what the table calls this revision (default: git's)")
    return parser


def record(folder: Path, what: str, table: Table, summary: Callable[[Table], str], page: Path = EVIDENCE) -> None:
    """Write a table to `<what>.csv`, and its summary between the page's markers of the same name.

    Raises:
        UsageError: the page lacks the markers.
    """
    put_into(folder / page, summary(table), what)
    (folder / TABLES).mkdir(parents=True, exist_ok=True)
    (folder / TABLES / f"{what}.csv").write_text(tables.text(table.header, table.columns, table.rows))


def conclude(
    asked: argparse.Namespace,
    what: str,
    table: Table,
    summary: Callable[[Table], str],
    *,
    page: Path = EVIDENCE,
    left: int = 0,
) -> None:
    """Print the summary of a table, and record the table if --record asks for it and no case is left."""
    print(summary(table))
    if asked.record is not None and not left:
        record(asked.record, what, table, summary, page)


def load(folder: Path, what: str) -> Table:
    """Read the table that `record` wrote."""
    return Table(*tables.parse((folder / TABLES / f"{what}.csv").read_text()))


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a small table of a page."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([str(cell).replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by what they have in common, in the order of the first ones."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def total(rows: Iterable[Mapping[str, str]], column: str) -> int:
    """Return the sum of a column of counts."""
    return sum(int(row[column]) for row in rows)
