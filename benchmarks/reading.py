"""Verbs that measure nothing: join results, compare them with others or with goals, tabulate them."""

from __future__ import annotations

import argparse
import sys

from .compare import compare_folders, describe, reproduced
from .errors import SHORT, UsageError
from .merge import merge, warnings
from .models import picture as models_picture
from .models import table as models_table
from .models.names import SUITE as MODELS
from .overview import SECTION, overview
from .pages import put_into
from .pictures import draw_all
from .reach import RULES, check
from .reach import describe as describe_goals
from .report import WHAT, picture_for, render, where
from .results import load
from .suites import SUITES


def join(options: argparse.Namespace, _: list[str]) -> int:
    """Join the folders of processes that shared a run, and draw their pictures."""
    for warning in warnings(options.folders):
        print(f"warning: {warning}", file=sys.stderr)
    merged = merge(options.folders, options.out, fresh=options.fresh)
    for results in merged:
        print(f"{results.suite}: {len(list(results.cells()))} cells, {len(results.rows)} figures")
    for path in draw_all(merged, options.out):
        print(f"drawn: {path}")
    return 0


def hold_against(options: argparse.Namespace, _: list[str]) -> int:
    """Hold a rerun against earlier results."""
    comparisons = compare_folders(options.old, options.new)
    print(describe(comparisons, options.within))
    return 0 if reproduced(comparisons, options.within) else SHORT


def report(options: argparse.Namespace, _: list[str]) -> int:
    """Print a folder's results as tables, or put them into a page.

    Raises:
        UsageError: there are none, or the page lacks the markers.
    """
    if (models := models_table.load(options.results)) is not None:
        return _report_models(options, models)
    found = [results for name in SUITES if (results := load(options.results, name)) is not None]
    if not found:
        raise UsageError(f"no results are in {options.results}; make some with `python -m benchmarks run`")
    if options.pictures:
        for path in draw_all(found, options.results):
            print(f"drawn: {path}", file=sys.stderr)
    if options.into is None:
        print(render(found))
        return 0
    put_into(options.into, render(found, picture_for(options.into, options.results)), options.between or WHAT)
    print(f"the tables in {options.into} are those of {options.results}")
    return 0


def summarise(options: argparse.Namespace, _: list[str]) -> int:
    """Print all results of some folders as one table, or put the table into a page.

    Raises:
        UsageError: there are none, or the page lacks the markers.
    """
    text = overview(options.results)
    if options.into is None:
        print(text)
        return 0
    put_into(options.into, text, SECTION)
    print(f"the tables in {options.into} are those of {', '.join(map(str, options.results))}")
    return 0


def _report_models(options: argparse.Namespace, table: models_table.Table) -> int:
    if options.pictures and (drawn := models_picture.draw(table, options.results)):
        print(f"drawn: {drawn}", file=sys.stderr)
    parts = [where(table.header), models_table.render(table)]
    if options.into is None:
        print("\n\n".join(parts))
        return 0
    if picture := picture_for(options.into, options.results, f"{MODELS}.png"):
        parts.insert(1, f"![Times the speed of eager torch, by model and variant]({picture})")
    # A page may hold the tables of several folders, `h200-models` and `h200-models-kernels`, each between its markers.
    own = options.results.resolve().name.partition("-")[2] or MODELS
    put_into(options.into, "\n\n".join(parts), options.between or own)
    print(f"the tables in {options.into} are those of {options.results}")
    return 0


def reach(options: argparse.Namespace, _: list[str]) -> int:
    """Hold results against the goals."""
    results = {rule.suite: load(options.results, rule.suite) for rule in RULES}
    checked = [check(rule, results.get(rule.suite)) for rule in RULES]
    print(describe_goals(checked, every=options.all))
    return 0 if all(one.met for one in checked) else SHORT
