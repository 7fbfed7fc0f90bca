"""`normforge tune`: measure which tiles suit the GPU that is here, and write them down as a table."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

from ..codegen.command import Parser
from ..codegen.errors import TileTableError
from ..codegen.instance import Bucket, Tile
from ..codegen.tiling import EVERY_CLASS, TileClass, standard_ladder
from ..errors import DeviceError
from ..kernels.gpu import architecture
from ..selection.on_demand import cache_folder
from .budget import Budget, OutOfTimeError
from .environment import describe, revision_of
from .machine import Machine, find_machine
from .tile_compiler import Compiler
from .tile_trials import Outcome, Row, Size, Sizes, Trial
from .tune_record import Record
from .tune_remark import listed

_ROOT = Path(__file__).resolve().parent.parent

# What most models run; the other classes of rows take as long again.
_ONLY = "fwd_16bit*,bwd_16bit*"
_MOST_JOBS = 16

# Kernels that are compiled before the first of them is timed, for each process that compiles: a row of a table has
# about 20, and the last of a group keeps one process busy.
_KERNELS_EACH = 4

_DESCRIPTION = """\
Measure candidate tiles on this GPU and print which won, beside the tile in use now. Rows are as long as the longest of
a range, and where they are many or some also a quarter up it, a length that fills no chunk; ragged ones are of that
length alone. With --out, write the winners into a table, which a generator takes: python generate.py --tiles FILE, or
by itself from codegen/tiles/ of a checkout. What the table holds of other classes and row lengths stays, and so does
the comment that it begins with. With --sizes other tiles of its rows stay too, and only rows that it has are measured.

A row of the table, a class and a range of row lengths, is written when it has been measured, and every time with it in
a report. A run that is interrupted, or has spent its --minutes, loses no row; the same command with --resume goes on.
Classes and lengths are measured in the order in which --only and --n name them.
Exit status: 0 done, 1 for some row no tile runs here or no time was left, 2 the request cannot be carried out.
"""


def main(argv: Sequence[str], prog: str, sizes: Sizes | None = None) -> int:
    """Run `normforge tune`.

    Args:
        argv: what follows the verb.
        prog: what help and messages call the program.
        sizes: how much to measure; by default what fills a data centre's GPU.

    Returns:
        0, or 1 if for some case no tile runs here, so that the table lacks that row, or if no time was left.

    Raises:
        DeviceError: there is no GPU.
        TileTableError: --out names no architecture's table, or one that cannot be read or written; or a report.
    """
    parser = _parser(prog)
    arguments = parser.parse_args(argv)
    budget = Budget(arguments.minutes)
    asked = _asked(parser, arguments)
    machine = find_machine()
    if machine.interpreted:
        raise DeviceError("tune compares times, and Triton's CPU interpreter has none to compare; run it on a GPU")
    record = _record(arguments, machine)
    if record is not None and arguments.sizes is not None:
        asked = record.held(asked)
        if not asked:
            parser.error(
                f"{arguments.out} has no row of what --only and --n name, whose other tiles --sizes would keep"
            )
    rows = asked if record is None or not arguments.resume else _left(asked, record)
    measured: dict[Row, list[Outcome]] = {}

    def take(row: Row, outcomes: list[Outcome]) -> None:
        if record is not None:
            record.add(row, outcomes)
        measured[row] = outcomes

    try:
        _measure(rows, machine.device, sizes or Sizes(), Compiler(machine.device, arguments.jobs), budget, take)
    except OutOfTimeError:
        pass
    finally:
        # Whatever ends the run: what it has found is what the next need not seek.
        status = _say([outcome for outcomes in measured.values() for outcome in outcomes], record)
    late = [row for row in rows if row not in measured]
    if late:
        on = "the same command with --resume goes on" if record is not None else "with --out FILE, --resume could go on"
        print(f"not measured, for lack of time: {listed(late)}; {on}")
    return 1 if late else status


def _left(asked: Sequence[Row], record: Record) -> list[Row]:
    """The rows that are to be measured; of the others it is said why not."""
    resumed = record.resume(asked)
    if resumed.kept:
        print(f"measured already, by {record.report}: {listed(resumed.kept)}")
    for sentence in resumed.again:
        print(sentence)
    return [row for row in asked if row not in resumed.kept]


def _measure(
    rows: Sequence[Row],
    device: torch.device,
    sizes: Sizes,
    compiler: Compiler,
    budget: Budget,
    take: Callable[[Row, list[Outcome]], None],
) -> None:
    with compiler, tqdm(total=len(rows), unit="row") as bar:

        def shown(what: str, of: int) -> Callable[[], None]:
            done = 0

            def advance() -> None:
                nonlocal done
                done += 1
                bar.set_postfix_str(f"{what}: {done} of {of}")
                budget.check()

            return advance

        for group, trials in _groups(rows, device, _KERNELS_EACH * compiler.jobs):
            budget.check()
            compiler.compile(trials, budget, shown("compile", len(trials)))
            for row in group:
                budget.check()
                outcomes = row.decide(device, sizes, shown(f"measure {listed([row])}", row.tries(device)))
                take(row, outcomes)
                for line in (line for outcome in outcomes for line in outcome.refused):
                    bar.write(f"left out: {line}")
                bar.update()


def _groups(rows: Sequence[Row], device: torch.device, least: int) -> Iterator[tuple[list[Row], list[Trial]]]:
    """Rows that are compiled together, with their trials: so many that every process has some, or what is left."""
    group: list[Row] = []
    trials: list[Trial] = []
    for row in rows:
        group.append(row)
        trials += row.trials(device)
        if len(trials) >= least:
            yield group, trials
            group, trials = [], []
    if group:
        yield group, trials


def _say(outcomes: Sequence[Outcome], record: Record | None) -> int:
    """Print what was found; 1 if a case has no tile."""
    lacking = [outcome.case for outcome in outcomes if outcome.winner is None]
    if outcomes:
        print(_report(outcomes))
    for case in lacking:
        print(f"no tile runs here for {case.kind.name}, N = {case.bucket}")
    if record is not None and outcomes:
        if record.has_written:
            print(f"\nwrote {record.table}; to use it: python generate.py --tiles {record.table}")
        print(f"every time is in {record.report}")
    return 1 if lacking else 0


def _report(outcomes: Sequence[Outcome]) -> str:
    headers = ["class", "N", "rows", "present", "µs", "best", "µs", "faster", "GB/s", "of"]
    rows = []
    for outcome in outcomes:
        won, before = outcome.winner, outcome.present_ms
        if won is not None:
            rows.append(
                [
                    outcome.case.kind.name,
                    ", ".join(map(str, outcome.case.lengths)),
                    _shown_rows(outcome),
                    _shown(outcome.present),
                    "fails" if before is None else f"{before * 1e3:.2f}",
                    "the same" if won.tile == outcome.present else _shown(won.tile),
                    f"{won.ms * 1e3:.2f}",
                    "" if before is None else f"{before / won.ms - 1:.1%}",
                    f"{won.gb_per_s:.0f}",
                    sum(tried.ms is not None for tried in outcome.tried),
                ]
            )
    return tabulate(rows, headers, disable_numparse=True)


def _shown_rows(outcome: Outcome) -> str:
    rows = ", ".join(map(str, outcome.rows))
    return f"{rows}, for every M" if outcome.case.size is Size.INVARIANT else rows


def _shown(tile: Tile) -> str:
    return " ".join(map(str, tile.row))


def _record(arguments: argparse.Namespace, machine: Machine) -> Record | None:
    out: Path | None = arguments.out
    if out is None and arguments.report is None:
        return None
    arch = architecture(machine.device)
    if out is not None and out.name != f"{arch}.yaml":
        raise TileTableError(
            f"--out {out}: a table is called after its architecture, and this GPU's is {arch}; "
            f"write --out {out.with_name(f'{arch}.yaml')}"
        )
    environment = describe(machine) | {
        "architecture": arch,
        "revision": arguments.revision or revision_of(_ROOT, "codegen/tiles"),
        # Of templates and generator: what a revision "with changes" does not say.
        "generator": cache_folder().name,
    }
    return Record(out, arguments.report, environment)


def _asked(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[Row]:
    """What is to be measured, class by class, so that what there is no time for are whole classes and then rows."""
    if arguments.minutes is not None and not (math.isfinite(arguments.minutes) and arguments.minutes > 0):
        parser.error(f"--minutes {arguments.minutes} is no time; write a number above 0, 30 or 0.5, say")
    if arguments.resume and arguments.out is None and arguments.report is None:
        parser.error("--resume goes on with what a run wrote; name that with --out FILE, or with --report FILE")
    buckets = _buckets(parser, arguments.n)
    sizes = _sizes(parser, arguments)
    return [Row(kind, bucket, sizes) for kind in _kinds(parser, arguments.only) for bucket in buckets]


def _sizes(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[Size, ...]:
    if arguments.sizes is None:
        return tuple(Size)
    asked, known = [word.strip() for word in arguments.sizes.split(",")], [size.value for size in Size]
    for word in asked:
        if word not in known:
            parser.error(f"--sizes {word!r} is no size of M; they are {', '.join(known)}")
    if arguments.out is None or not arguments.out.exists():
        parser.error("--sizes keeps a table's other tiles; name one that is there with --out FILE")
    return tuple(size for size in Size if size.value in asked)


def _kinds(parser: argparse.ArgumentParser, only: str) -> list[TileClass]:
    globs = [glob.strip() for glob in only.split(",")]
    for glob in globs:
        if not any(fnmatchcase(kind.name, glob) for kind in EVERY_CLASS):
            parser.error(f"--only {glob!r} matches no class; they are {', '.join(kind.name for kind in EVERY_CLASS)}")
    return list(dict.fromkeys(kind for glob in globs for kind in EVERY_CLASS if fnmatchcase(kind.name, glob)))


def _buckets(parser: argparse.ArgumentParser, lengths: str | None) -> list[Bucket]:
    ladder = standard_ladder()
    if lengths is None:
        return list(ladder)
    wanted = [text.strip() for text in lengths.split(",")]
    for text in wanted:
        if not text.isdecimal() or int(text) < 1:
            parser.error(f"--n {text!r} is no row length; write whole numbers from 1, separated by commas")
    return list(dict.fromkeys(bucket for text in wanted for bucket in ladder if int(text) in bucket))


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(prog, _DESCRIPTION)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the table to write, called after the architecture")
    parser.add_argument(
        "--only", default=_ONLY, metavar="GLOB[,GLOB]", help=f"classes to measure, '*' for all (default: {_ONLY})"
    )
    parser.add_argument(
        "--sizes",
        metavar="SIZE[,SIZE]",
        help="measure only tiles for these sizes of M, of rows that --out has, and keep the others: "
        f"{', '.join(size.value for size in Size)}",
    )
    parser.add_argument("--n", metavar="N[,N]", help="measure only the buckets that serve these row lengths")
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="stop after so long, compiling included, and say what is left"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="leave out what a run with this GPU, these versions and this revision wrote into --out or --report before",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="where every time goes, a JSON object a row of the table (default: beside --out, ending in .jsonl)",
    )
    parser.add_argument("--revision", help="what is stated of this tree; default: git's")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(os.cpu_count() or 1, _MOST_JOBS),
        help="processes that compile ahead (default: one a core, up to %(default)s); 0: each kernel in its turn",
    )
    return parser
