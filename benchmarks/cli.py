"""Run, list and profile suites, time start-up and parts of calls, compare results, check goals."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from .chosen import OVERVIEW, RESULTS, matching, of_seed
from .errors import SHORT, USAGE, UsageError

__all__ = ["SHORT", "USAGE", "main"]

# `profile` shows these suites by default: not the suite that times the host, nor another's shapes.
PROFILED = ("forward", "backward", "quant", "decode")

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the result is the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _choose_caches()
    try:
        options = _parser().parse_args(given)
        # Imported late: a verb that only reads needs neither torch nor a GPU.
        module, _, function = options.verb.partition(":")
        return int(vars(import_module(f".{module}", __package__))[function](options, given))
    except ModuleNotFoundError as error:
        print(f"error: {error}; the benchmark needs `pip install -e '.[bench]'`", file=sys.stderr)
        return USAGE
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


def _choose_caches() -> None:
    """Say where compilers keep what they compiled, before torch and Triton are imported and read it."""
    # A cache of our own, so that nothing that another program found on a busy GPU is taken over.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "normforge-benchmarks-inductor"))
    # Triton's own default: unless it is spelled out, Inductor moves it, but only once it has compiled something.
    home = Path(os.environ.get("TRITON_HOME", Path.home()))
    os.environ.setdefault("TRITON_CACHE_DIR", str(home / ".triton" / "cache"))


def list_cells(options: argparse.Namespace, _: list[str]) -> int:
    """Print cells and providers."""
    from .providers import find_providers
    from .suites import SUITES

    for suite in of_seed([SUITES[name] for name in options.suite or SUITES], options.seed):
        cells = matching(suite.cells, options.only)
        print(f"{suite.name}: {suite.title}, {len(cells)} of {len(suite.cells)} cells")
        print("".join(f"  {cell.id}\n" for cell in cells), end="")
    present, absent = find_providers([])
    print(f"providers: {', '.join(present)}")
    for name, reason in absent.items():
        print(f"  not here: {name} ({reason})")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_measuring(verbs)
    _add_reading(verbs)
    return parser


def _add_measuring(verbs: Verbs) -> None:
    run = verbs.add_parser("run", help="measure; what a results file holds already is not measured again")
    _choose(run)
    _choose_names(run, "--providers")
    _write_to(run)
    run.add_argument("--budget-ms", type=float, default=50.0, help="device time of a provider on a cell (%(default)s)")
    run.add_argument("--rows", type=int, help="no more rows than this, to try the benchmark out")
    _go_on(run, "providers take within that time", 2)
    run.set_defaults(verb="run:run")

    show = verbs.add_parser("list", help="print cells and providers")
    _choose(show)
    show.set_defaults(verb="cli:list_cells")

    startup = verbs.add_parser("startup", help="time processes from their start to the first result")
    startup.add_argument("--runs", type=int, default=3, help="processes a way; the median counts (%(default)s)")
    _write_to(startup)
    startup.set_defaults(verb="startup:startup")

    parts = verbs.add_parser("parts", help="time eager calls of every family on the host")
    parts.add_argument("--seconds", type=_seconds, default=20.0, metavar="S", help="for all passes (%(default)s)")
    _write_to(parts)
    parts.add_argument("--beside", type=Path, metavar="TREE", help="a checkout of another revision, timed in turn")
    parts.add_argument("--beside-revision", help="what the header states of it; default: git's")
    parts.set_defaults(verb="parts:parts")

    reduced = verbs.add_parser("reduced", help="time norms behind an all-reduce, on all GPUs of this host")
    _write_to(reduced, "-reduced")
    reduced.add_argument("--soak", type=float, metavar="MINUTES", help="compare sums of random calls, and time nothing")
    reduced.set_defaults(verb="reduced:reduced")

    both = verbs.add_parser("both-ways", help="time norms and gradients quantised along rows and columns, on a GPU")
    _write_to(both, "-both-ways")
    _choose_cells(both)
    both.add_argument("--rows", type=int, help="no more rows and columns than this, to try the benchmark out")
    both.set_defaults(verb="both_ways:both_ways")

    _add_models(verbs)

    profile = verbs.add_parser(
        "profile",
        help="show what a profiler sees of the kernels: time, registers, occupancy",
        description="Run the calls of cells a few times under torch's profiler, on a GPU, and show every kernel that a "
        "call launches: its time, grid, threads, registers, shared memory and estimated occupancy.",
    )
    _choose(profile, PROFILED)
    _choose_names(profile, "--providers", ["normforge"])
    _write_to(profile)
    profile.set_defaults(verb="profile:profile")


def _add_models(verbs: Verbs) -> None:
    from .models.names import DTYPES, RUNS, STEPS

    models = verbs.add_parser(
        "models",
        help="time training and decode steps of whole models",
        description="Time a training step and a decode step of small random-weight models with torch's norms, patched, "
        "and with Liger's, eagerly and compiled. Each variant is checked against torch's model before it is timed; "
        "what the table holds already is not run again.",
    )
    _choose_names(models, "--models")
    _choose_names(models, "--variants")
    models.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="default: all")
    models.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="default: all")
    models.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, help="default: all")
    models.add_argument("--quick", action="store_true", help="two layers and few tokens, to try the benchmark out")
    _write_to(models, "-models")
    _go_on(models, "variants take", 5)
    models.set_defaults(verb="models.command:models")


def _add_reading(verbs: Verbs) -> None:
    beside = verbs.add_parser("beside", help="compare two runs; status 1 if a time moved by more than the noise")
    beside.add_argument("old", type=Path, metavar="OLD", help="folder of the earlier results")
    beside.add_argument("new", type=Path, metavar="NEW", help="folder of the rerun")
    beside.add_argument(
        "--within", type=_bound, default=0.03, metavar="SHARE", help="how far a time may move at least (%(default)s)"
    )
    beside.set_defaults(verb="reading:beside")

    folders = [RESULTS / name for name in OVERVIEW]
    report = verbs.add_parser("report", help="write one HTML page of results: tables, pictures, versions, revisions")
    report.add_argument("--results", type=Path, nargs="+", default=folders, help="folders; default: those of an H200")
    report.add_argument("--out", type=Path, default=Path("report.html"), help="the page (%(default)s)")
    report.add_argument("--into", type=Path, help="put a folder's tables between this file's markers instead")
    report.add_argument("--between", metavar="NAME", default="benchmarks", help="which markers (%(default)s)")
    report.add_argument("--pictures", action="store_true", help="draw the pictures again")
    report.set_defaults(verb="reading:report")

    overview = verbs.add_parser("overview", help="print all results of some folders as one table")
    overview.add_argument("--results", type=Path, nargs="+", default=folders, help="default: those of an H200")
    overview.add_argument("--into", type=Path, help="put the table between this page's markers instead")
    overview.set_defaults(verb="reading:summarise")

    reach = verbs.add_parser("reach", help="hold results against the goals; status 1 if one is not reached")
    reach.add_argument("--results", type=Path, default=RESULTS / "h200", help="folder of the results (%(default)s)")
    reach.add_argument("--all", action="store_true", help="list every cell, not only those that fall short")
    reach.set_defaults(verb="reading:reach")


def _choose_names(parser: argparse.ArgumentParser, option: str, default: Sequence[str] = ()) -> None:
    words = f"names or shell patterns; default: {' '.join(default) or 'all'}"
    parser.add_argument(option, nargs="+", default=default, metavar="NAME", help=words)


def _go_on(parser: argparse.ArgumentParser, turns: str, rounds: int) -> None:
    """Add the options of a verb that goes on with the results of an earlier run."""
    parser.add_argument("--jobs", type=int, default=0, metavar="J", help="first compile everything in J processes")
    parser.add_argument("--minutes", type=float, help="begin nothing after so long, and say what is left")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"turns that {turns} (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="begin the results anew instead of going on with them")
    parser.add_argument("--retry", action="store_true", help="measure recorded failures again")


def _write_to(parser: argparse.ArgumentParser, suffix: str = "") -> None:
    folder = f"benchmarks/results/<device>{suffix}"
    parser.add_argument("--out", type=Path, help=f"folder of the results; default: {folder}")
    parser.add_argument("--revision", help="what the header states; default: git's")


def _number(text: str, *, wrong: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} {wrong}")
    return number


_bound = partial(_number, wrong="is no bound; give a share of the old time, such as 0.03 for 3 %")
_seconds = partial(_number, wrong="is no time; give seconds, such as 20")


def _choose(parser: argparse.ArgumentParser, default: Sequence[str] = ()) -> None:
    from .suites import SUITES

    parser.add_argument(
        "--suite",
        nargs="+",
        choices=SUITES,
        default=default,
        metavar="SUITE",
        help=f"{', '.join(SUITES)}; default: {' '.join(default) or 'all'}",
    )
    _choose_cells(parser)
    parser.add_argument(
        "--seed", type=int, help="what the cells of the suite sweep are drawn by, any integer; default: 0"
    )


def _choose_cells(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=[], metavar="CELL", help="parts of cell ids, or shell patterns")
