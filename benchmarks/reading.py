"""Verbs that measure nothing: compare results with others or with goals, tabulate them."""

from __future__ import annotations

import argparse
import sys

from .beside import compare, describe, moved
from .errors import SHORT, UsageError
from .overview import SECTION, overview
from .pages import put_into
from .pictures import draw_all
from .reach import RULES, check
from .reach import describe as describe_goals
from .report import markdown, page, pictures_of
from .results import load
from .suites import SUITES


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
            found = [results for name in SUITES if (results := load(folder, name)) is not None]
            for path in draw_all(found, folder):
                print(f"drawn: {path}", file=sys.stderr)
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
