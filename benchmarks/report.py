"""Results as a page: every table of some folders with its pictures, as HTML, or one folder's tables in Markdown."""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from . import tables
from .grids import Grid
from .models.names import SUITE as MODELS
from .models.table import load as load_models
from .models.table import tables_of as tables_of_models
from .providers import every_provider
from .results import SEED, Results, Row, load
from .suites import SUITES

_NUMBER = re.compile(r"[\d.]+")
# The most lines that a page shows of a table that is no suite's: a profile has thousands.
_MOST_LINES = 200
_STYLE = (
    "body{font-family:sans-serif;margin:2em}table{border-collapse:collapse;font-size:small}td,th{padding:.1em .6em}"
)


def tables_of(folder: Path) -> dict[str, list[Grid]]:
    """Return the tables of a folder's files, under a line that says where each file was measured."""
    found: dict[str, list[Grid]] = {}
    for path in sorted(folder.glob("*.csv")):
        header, names, rows = tables.parse(path.read_text())
        name = path.stem
        if name in SUITES and (results := load(folder, name)) is not None:
            made = list(_of_suite(results))
        elif name == MODELS and (models := load_models(folder)) is not None:
            made = tables_of_models(models)
        else:
            left = [f"{len(rows) - _MOST_LINES} lines more are in the file."] if len(rows) > _MOST_LINES else []
            made = [Grid(name, names, [list(row.values()) for row in rows[:_MOST_LINES]], left)]
        found.setdefault(where(header), []).extend(made)
    return found


def where(header: Mapping[str, str]) -> str:
    """Return the line that says where and with which versions results were measured."""
    # A seed is a suite's own.
    stated = (value if key == "device" else f"{key} {value}" for key, value in header.items() if key != SEED)
    return f"Measured on {', '.join(stated)}."


def markdown(folder: Path, pictures: Mapping[str, str]) -> str:
    """Return a folder's tables as Markdown, with pictures, by title, above each measurement's."""
    shown = [f"![{title}]({path})" for title, path in pictures.items()]
    parts = [[line, *shown, *(table.markdown() for table in made)] for line, made in tables_of(folder).items()]
    return "\n\n".join(text for part in parts for text in part)


def pictures_of(folder: Path, page: Path) -> dict[str, str]:
    """Return the paths of a folder's pictures, relative to a page, by title."""
    paths = {path.stem: os.path.relpath(path, page.resolve().parent) for path in sorted(folder.glob("*.png"))}
    return {_title(name): Path(path).as_posix() for name, path in paths.items()}


def page(folders: list[Path], summary: list[Grid]) -> str:
    """Return one HTML page: a summary, then every folder's pictures and tables."""
    parts = ["<h1>Benchmarks</h1>", *map(_html, summary)]
    for folder in folders:
        parts.append(f"<h2>{html.escape(folder.name)}</h2>")
        for path in sorted(folder.glob("*.png")):
            drawn = base64.b64encode(path.read_bytes()).decode()
            parts.append(f'<img alt="{html.escape(_title(path.stem))}" src="data:image/png;base64,{drawn}">')
        for line, made in tables_of(folder).items():
            parts += [f"<p>{html.escape(line)}</p>", *map(_html, made)]
    body = "\n".join(parts)
    return f'<!doctype html>\n<meta charset="utf-8">\n<title>Benchmarks</title>\n<style>{_STYLE}</style>\n{body}\n'


def _html(table: Grid) -> str:
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in table.notes)
    return f"<h3>{html.escape(table.title)}</h3>\n{table.cells('html')}\n{notes}"


def _title(name: str) -> str:
    suite, ratios, _ = name.partition("-ratios")
    title = SUITES[suite].title if suite in SUITES else suite
    return f"{title}: throughput over that of a copy, by shape" if ratios else title


def _of_suite(results: Results) -> Iterator[Grid]:
    """Return a table per task and kind: a line per cell, or per provider where cells are no sweep."""
    suite, rows = SUITES[results.suite], results.rows.values()
    unit = "TB/s" if suite.unit == "GB/s" else suite.unit
    for task, kind in dict.fromkeys((row.task, row.kind) for row in rows):
        own = [row for row in rows if (row.task, row.kind) == (task, kind)]
        names = {row.provider for row in own}
        shown = {name: provider.label for name, provider in every_provider().items() if name in names}
        lines = [
            (cell.rpartition("/")[2].replace("x", "×"), *(_figure(unit, results.of(cell).get(name)) for name in shown))
            for cell in dict.fromkeys(row.cell for row in own)
        ]
        heads: tuple[str, ...] = (unit, *shown.values())
        if not suite.sweeps:
            heads, *lines = zip(heads, *lines, strict=True)
        # The first reason of those that differ in numbers alone.
        failed = {(row.provider, _NUMBER.sub("", row.status)): row for row in reversed(own) if not row.ok}
        notes = [f"{shown.get(row.provider, row.provider)}: `{row.status}`." for row in failed.values()]
        yield Grid(f"{suite.title}: {task.replace('_', ' ')}, {kind}", heads, lines, notes)


def _figure(unit: str, row: Row | None) -> str:
    if row is None:
        return "–"
    if not row.ok:
        return "fails"
    return f"{row.gb_per_s / 1e3:.2f}" if unit == "TB/s" else f"{row.us:.2f}"
