"""The table of mutants and of the tests that caught them, and a summary of the table."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from benchmarks.environment import revision_of

from ..evidence import Table, grouped, markdown
from .tree import ROOT
from .trial import Outcome, Verdict

_COLUMNS = ("file", "breaks", "verdict", "caught by", "suite")


def header(given: str | None) -> dict[str, str]:
    """Return what the table states: versions and the revision, git's unless one is given."""
    versions = {package: version(package) for package in ("torch", "triton")}
    return {"python": platform.python_version(), **versions, "revision": given or revision_of(ROOT)}


def table(outcomes: Sequence[Outcome], stated: Mapping[str, str], seconds: float) -> Table:
    """Return the full table, a row per mutant, under a header and the seconds that it took."""
    rows = []
    for outcome in outcomes:
        mutant = outcome.mutant
        values = (mutant.file, mutant.breaks, outcome.verdict.value, outcome.said, mutant.suite.value)
        rows.append([" ".join(value.split()) for value in values])
    return Table.of({**stated, "seconds": f"{seconds:.0f}"}, _COLUMNS, rows)


def summary(table: Table) -> str:
    """Return the section of the page: how many mutants of each folder are caught, and those that are not."""
    missed = [row for row in table.rows if row["verdict"] != Verdict.CAUGHT.value]
    folders = grouped(table.rows, lambda row: row["file"].partition("/")[0])
    lines = [(f"`{name}/`", sum(row not in missed for row in rows), len(rows)) for name, rows in folders.items()]
    parts = [
        table.where,
        f"**{len(table.rows) - len(missed)} of {len(table.rows)} are caught.**",
        markdown(("edits in", "caught", "of"), lines),
    ]
    parts += [f"- {row['verdict']}: `{row['file']}`, {row['breaks']}: {row['caught by']}" for row in missed]
    return "\n\n".join(parts)
