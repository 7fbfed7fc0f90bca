"""`normforge tune`: measure which tiles suit the GPU that is here, and write them down as a table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

from ..codegen.errors import TileTableError
from ..codegen.instance import Tile
from ..kernels.gpu import target_of
from ..selection.on_demand import cache_folder
from .budget import Budget, OutOfTimeError
from .environment import describe, revision_of
from .machine import Machine, find_gpu
from .tile_compiler import Compiler
from .tile_trials import Outcome, Row, Size, Sizes, Trial
from .tune_options import Request
from .tune_record import Record
from .tune_remark import listed

_ROOT = Path(__file__).resolve().parent.parent

# Kernels that are compiled before the first of them is timed, for each process that compiles: a row of a table has
# about 20, and the last of a group keeps one process busy.
_KERNELS_EACH = 4


def main(request: Request, sizes: Sizes | None = None) -> int:
    """Run `normforge tune`.

    Args:
        request: what the command line asks for.
        sizes: how much to measure; by default what fills a data centre's GPU.

    Returns:
        0, or 1 if for some case no tile runs here, so that the table lacks that row, or if no time was left.

    Raises:
        DeviceError: there is no GPU.
        TileTableError: --out names no architecture's table, or one that cannot be read or written; or a report.
    """
    arguments = request.arguments
    budget = Budget(arguments.minutes)
    # Class by class, so that what there is no time for are whole classes and then rows.
    asked = [Row(kind, bucket, request.sizes) for kind in request.kinds for bucket in request.buckets]
    machine = find_gpu()
    record = _record(arguments, machine)
    if record is not None and arguments.sizes is not None:
        asked = record.held(asked)
        if not asked:
            request.parser.error(
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
    """Return the rows to measure, and print why other rows are not measured."""
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
    arch = target_of(machine.device).arch
    if out is not None and out.name != f"{arch}.yaml":
        raise TileTableError(
            f"--out {out}: a table is called after its architecture, and this GPU's is {arch}; "
            f"write --out {out.with_name(f'{arch}.yaml')}"
        )
    environment = describe(machine) | {
        "architecture": arch,
        "revision": arguments.revision or revision_of(_ROOT, "codegen/tiles"),
        # A digest of templates and generator, because a revision "with changes" names no content.
        "generator": cache_folder().name,
    }
    return Record(out, arguments.report, environment)
