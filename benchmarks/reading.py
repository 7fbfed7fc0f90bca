"""Verbs that measure nothing: join results, compare them with others or with goals, tabulate them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .beside import compare, describe, moved
from .errors import SHORT, UsageError
from .models import picture as models_picture
from .models import table as models_table
from .overview import SECTION, overview
from .pages import put_into
from .pictures import draw_all
from .reach import RULES, check
from .reach import describe as describe_goals
from .report import markdown, page, pictures_of
from .results import Results, load
from .suites import SUITES


def join(options: argparse.Namespace, _: list[str]) -> int:
    """Join the folders of processes that shared a run into a new one, and draw its pictures.

    Raises:
        UsageError: a folder holds no results, two headers differ, a figure is there twice, or a suite is in `--out`.
    """
    merged: dict[str, Results] = {}
    for folder in options.folders:
        found = [results for name in SUITES if (results := load(folder, name)) is not None]
        if not found:
            raise UsageError(f"no results are in {folder}; make some with `python -m benchmarks run --out {folder}`")
        for results in found:
            _add(merged.setdefault(results.suite, Results(results.suite, results.header)), results, folder)
    taken = [f"{name}.csv" for name in merged if (options.out / f"{name}.csv").exists()]
    if taken:
        raise UsageError(f"--out {options.out} holds {', '.join(taken)}; name another folder")
    for name, results in merged.items():
        # Cells that the table has with more rows, as trials with --rows make them, come last.
        position = {cell.id: index for index, cell in enumerate(SUITES[name].of_seed(results.seed).cells)}
        rows = sorted(results.rows.items(), key=lambda item: position.get(item[0][0], len(position)))
        results.rows = dict(rows)
        results.save(options.out)
        print(f"{name}: {len(list(results.cells()))} cells, {len(results.rows)} figures")
    _draw([*merged.values()], options.out)
    return 0


def _add(whole: Results, part: Results, folder: Path) -> None:
    if part.header != whole.header:
        raise UsageError(f"the header of {folder / part.suite}.csv differs; only results of one run can be merged")
    twice = [f"{provider} on {cell}" for cell, provider in part.rows if (cell, provider) in whole.rows]
    if twice:
        raise UsageError(f"{folder / part.suite}.csv has {twice[0]}, which another folder has too; leave one out")
    for row in part.rows.values():
        whole.add(row)


def beside(options: argparse.Namespace, _: list[str]) -> int:
    """Compare two runs, and name what moved by more than the noise."""
    comparisons = compare(options.old, options.new)
    for grid in describe(comparisons, options.within):
        print(f"{grid.markdown()}\n")
    return SHORT if any(moved(one, options.within) for one in comparisons) else 0


def report(options: argparse.Namespace, _: list[str]) -> int:
    """Write one HTML page of some folders, or put one folder's tables into a page.

    Raises:
        UsageError: there are none, or the page lacks the markers.
    """
    empty = [str(folder) for folder in options.results if not any(folder.glob("*.csv"))]
    if empty:
        raise UsageError(f"no results are in {', '.join(empty)}; make some with `python -m benchmarks run`")
    if options.pictures:
        for folder in options.results:
            _draw([results for name in SUITES if (results := load(folder, name)) is not None], folder)
            if (models := models_table.load(folder)) is not None:
                models_picture.draw(models, folder)
    if options.into is None:
        options.out.write_text(page(options.results, overview(options.results)))
        print(f"written: {options.out}")
        return 0
    for folder in options.results:
        put_into(options.into, markdown(folder, pictures_of(folder, options.into)), options.between)
        print(f"the tables in {options.into} are those of {folder}")
    return 0


def summarise(options: argparse.Namespace, _: list[str]) -> int:
    """Print all results of some folders as one table, or put the table into a page.

    Raises:
        UsageError: there are none, or the page lacks the markers.
    """
    text = "\n\n".join(grid.markdown() for grid in overview(options.results))
    if not text:
        raise UsageError(
            f"no results are in {', '.join(map(str, options.results))}; make some: python -m benchmarks run"
        )
    if options.into is None:
        print(text)
        return 0
    put_into(options.into, text, SECTION)
    print(f"the tables in {options.into} are those of {', '.join(map(str, options.results))}")
    return 0


def reach(options: argparse.Namespace, _: list[str]) -> int:
    """Hold results against the goals."""
    results = {rule.suite: load(options.results, rule.suite) for rule in RULES}
    checked = [check(rule, results.get(rule.suite)) for rule in RULES]
    print(describe_goals(checked, every=options.all))
    return 0 if all(one.met for one in checked) else SHORT


def _draw(found: list[Results], folder: Path) -> None:
    for path in draw_all(found, folder):
        print(f"drawn: {path}", file=sys.stderr)
