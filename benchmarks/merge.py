"""Joins the results of one run that several processes shared, a folder each, into one folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .errors import UsageError
from .results import SEED, Results, load
from .runner import running
from .suites import SUITES

_ENDINGS = (".csv", ".png", "-ratios.png", ".running")


class Part(NamedTuple):
    """A suite's results in one folder."""

    folder: Path
    results: Results

    @property
    def path(self) -> Path:
        """The file they were read from."""
        return self.folder / f"{self.results.suite}.csv"


def merge(folders: Sequence[Path], out: Path, *, fresh: bool) -> list[Results]:
    """Write every suite that the folders hold into another, cells in the order of the suite's table.

    Nothing is written unless everything fits together.

    Args:
        folders: where processes of one run wrote.
        out: a folder that is not there yet, or empty.
        fresh: whether `out` may hold suites already; they are removed, also those that no folder has. Files of anything
            else stay.

    Returns:
        The joined results, in the order of `SUITES`.

    Raises:
        UsageError: a folder holds no results, two headers differ, a provider's cell is in two folders, or `out` is in
            use.
    """
    if out.resolve() in [folder.resolve() for folder in folders]:
        raise UsageError(f"--out {out} is one of the folders to merge; name another")
    parts = _read(folders)
    _require_one_header(parts)
    merged = [joined for name in SUITES if (joined := _join([part for part in parts if part.results.suite == name]))]
    _make_room(out, fresh)
    for results in merged:
        results.save(out)
    return merged


def warnings(folders: Sequence[Path]) -> list[str]:
    """Return warnings about merged results: runs that were cut off, and tables of no suite."""
    cut_off = [mark for folder in folders for name in SUITES if (mark := running(folder, name)).exists()]
    others = [path for folder in folders for path in sorted(folder.glob("*.csv")) if path.stem not in SUITES]
    return [
        *(
            f"{mark} says that a run goes on there, or was killed; its command, given again, ends it"
            for mark in cut_off
        ),
        *(f"{path} belongs to no suite and stays where it is" for path in others),
    ]


def _read(folders: Iterable[Path]) -> list[Part]:
    parts = []
    for folder in folders:
        found = [Part(folder, results) for name in SUITES if (results := load(folder, name)) is not None]
        if not found:
            raise UsageError(f"no results are in {folder}; make some with `python -m benchmarks run --out {folder}`")
        parts += found
    return parts


def _require_one_header(parts: Sequence[Part]) -> None:
    first = parts[0]
    for part in parts[1:]:
        ours, theirs = first.results.header, part.results.header
        # A seed is a suite's own, and `_join` sees to it.
        for key in {**ours, **theirs}:
            if key != SEED and ours.get(key) != theirs.get(key):
                raise UsageError(
                    f"{key} is {ours.get(key, 'missing')} in {first.path} and {theirs.get(key, 'missing')} in "
                    f"{part.path}; only results of one run can be merged: leave one out, or measure it again"
                )


def _join(parts: Sequence[Part]) -> Results | None:
    if not parts:
        return None
    first = parts[0].results
    sources: dict[tuple[str, str], Path] = {}
    for part in parts:
        if part.results.seed != first.seed:
            raise UsageError(
                f"{parts[0].path} was drawn by seed {first.seed}, and {part.path} by {part.results.seed}; only cells "
                "of one seed can be merged: leave one out, or measure it again"
            )
        for cell, provider in part.results.rows:
            if (cell, provider) in sources:
                raise UsageError(
                    f"{provider} was measured on {cell} in both {sources[cell, provider]} and {part.path}; "
                    "leave one of the folders out, or measure slices that do not overlap (`--share`, `--only`)"
                )
            sources[cell, provider] = part.path
    # Cells that the table has with more rows, as trials with --rows make them, come last.
    position = {cell.id: index for index, cell in enumerate(SUITES[first.suite].of_seed(first.seed).cells)}
    rows = [item for part in parts for item in part.results.rows.items()]
    rows.sort(key=lambda item: position.get(item[0][0], len(position)))
    return Results(first.suite, dict(first.header), dict(rows))


def _make_room(out: Path, fresh: bool) -> None:
    there = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if there and not fresh:
        raise UsageError(
            f"--out {out} is not empty ({there[0]}{f' and {len(there) - 1} more' if there[1:] else ''}); "
            "pass --fresh to replace the suites in it, or name another"
        )
    for name in SUITES:
        for ending in _ENDINGS:
            (out / f"{name}{ending}").unlink(missing_ok=True)
