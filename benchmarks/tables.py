"""Tables as CSV: comments that name the device, versions and revision, and then the rows.

Imports nothing beyond Python, because `proving matrix` runs before there is an environment.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Mapping
from typing import Any


def text(header: Mapping[str, str], columns: Collection[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table as CSV."""
    stream = io.StringIO()
    stream.writelines(f"# {key}: {value}\n" for key, value in header.items())
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def parse(text: str) -> tuple[dict[str, str], list[str], list[dict[str, str]]]:
    """Return the header of a table, the names of its columns, and its rows of texts."""
    lines = text.splitlines()
    comments = [line[2:].partition(": ") for line in lines if line.startswith("# ")]
    reader = csv.DictReader(line for line in lines if not line.startswith("# "))
    rows = list(reader)
    return {key: value for key, _, value in comments}, list(reader.fieldnames or ()), rows
