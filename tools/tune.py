"""`normforge tune`: measure which tiles suit the GPU that is here, and write them down as a table."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

from ..codegen import tile_tables
from ..codegen.command import Parser
from ..codegen.errors import TileTableError
from ..codegen.instance import Bucket, Tile, Tiles
from ..codegen.tile_tables import TileTable
from ..codegen.tiling import EVERY_CLASS, TileClass, standard_ladder
from ..errors import DeviceError
from ..kernels.gpu import architecture
from .machine import Machine, find_machine
from .tile_trials import Case, Outcome, Sizes, Trial, compile_all, decide

# What most models run; the other classes of rows take as long again.
_ONLY = "fwd_16bit*,bwd_16bit*"
_MOST_JOBS = 16

_DESCRIPTION = """\
Measure candidate tiles on this GPU and print which won, beside the tile in use now. With --out, write the winners into
a table, which a generator takes: python generate.py --tiles FILE, or by itself from codegen/tiles/ of a checkout.
What the table holds of other classes and row lengths stays.
"""


def main(argv: Sequence[str], prog: str, sizes: Sizes | None = None) -> int:
    """Run `normforge tune`.

    Args:
        argv: what follows the verb.
        prog: what help and messages call the program.
        sizes: how much to measure; by default what fills a data centre's GPU.

    Returns:
        0, or 1 if for some case no tile runs here; the table then lacks that bucket.

    Raises:
        DeviceError: there is no GPU.
        TileTableError: --out names no architecture's table, or one that cannot be read.
    """
    parser = _parser(prog)
    arguments = parser.parse_args(argv)
    kinds = _kinds(parser, arguments.only)
    buckets = _buckets(parser, arguments.n)
    machine = find_machine()
    if machine.interpreted:
        raise DeviceError("tune compares times, and Triton's CPU interpreter has none to compare; run it on a GPU")
    arch = architecture(machine.device)
    old = None if arguments.out is None else _read(arguments.out, arch)
    outcomes, lacking = _measure(kinds, buckets, machine, sizes or Sizes(), arguments.jobs)
    print(_report(outcomes))
    for case in lacking:
        print(f"no tile runs here for {case.kind.name}, N = {case.bucket}")
    won = _table(outcomes)
    if arguments.out is not None and old is not None and won.rows:
        table = tile_tables.merge(old, won)
        remark = f"Measured by normforge tune on {machine.name}: torch {torch.__version__}, Triton {version('triton')}."
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(tile_tables.write_table(table, remark), encoding="utf-8")
        print(f"\nwrote {arguments.out}; to use it: python generate.py --tiles {arguments.out}")
    return 1 if lacking else 0


def _measure(
    kinds: Sequence[TileClass], buckets: Sequence[Bucket], machine: Machine, sizes: Sizes, jobs: int
) -> tuple[list[Outcome], list[Case]]:
    cases = [Case(kind, bucket, few) for kind in kinds for bucket in buckets for few in (False, True, None)]
    trials = [Trial(case, tile) for case in cases for tile in case.tiles(machine.device, case.rows(sizes))]
    # A tile is compiled once, whether for few rows or for many.
    distinct = list({(trial.case.kind, trial.case.n, trial.tile): trial for trial in trials}.values())
    with tqdm(total=len(distinct) if jobs else 0, desc="compile", unit="kernel", disable=not jobs) as bar:
        compile_all(distinct, machine.device, jobs, bar.update)
    outcomes, lacking = [], []
    with tqdm(total=len(trials), desc="measure", unit="tile") as bar:
        for case in cases:
            bar.set_postfix_str(f"{case.kind.name} N={case.n}")
            outcome = decide(case, machine.device, sizes, bar.update)
            if outcome is None:
                lacking.append(case)
            else:
                outcomes.append(outcome)
                for line in outcome.refused:
                    bar.write(f"left out: {line}")
    return outcomes, lacking


def _table(outcomes: Sequence[Outcome]) -> TileTable:
    """The winners, of the buckets for which there are both."""
    best = {(outcome.case.kind, outcome.case.bucket, outcome.case.few): outcome.best for outcome in outcomes}
    rows: dict[TileClass, tuple[tuple[Bucket, Tiles], ...]] = {}
    for kind, bucket, few in best:
        small = best.get((kind, bucket, True))
        if few is False and small is not None:
            large, own = best[kind, bucket, False], best.get((kind, bucket, None))
            rows[kind] = (*rows.get(kind, ()), (bucket, Tiles(large, small, None if own == large else own)))
    return TileTable(rows)


def _report(outcomes: Sequence[Outcome]) -> str:
    headers = ["class", "N", "rows", "present", "µs", "best", "µs", "faster", "GB/s", "of"]
    rows = [
        [
            outcome.case.kind.name,
            outcome.case.n,
            f"{outcome.rows}{', for every M' if outcome.case.few is None else ''}",
            _shown(outcome.present),
            "fails" if outcome.present_ms is None else f"{outcome.present_ms * 1e3:.2f}",
            "the same" if outcome.best == outcome.present else _shown(outcome.best),
            f"{outcome.best_ms * 1e3:.2f}",
            "" if outcome.present_ms is None else f"{outcome.present_ms / outcome.best_ms - 1:.1%}",
            f"{outcome.gb_per_s:.0f}",
            outcome.tried,
        ]
        for outcome in outcomes
    ]
    return tabulate(rows, headers, disable_numparse=True)


def _shown(tile: Tile) -> str:
    return " ".join(map(str, tile.row))


def _read(out: Path, arch: str) -> TileTable:
    if out.name != f"{arch}.yaml":
        raise TileTableError(
            f"--out {out}: a table is called after its architecture, and this GPU's is {arch}; "
            f"write --out {out.with_name(f'{arch}.yaml')}"
        )
    return tile_tables.read_table(out) if out.exists() else TileTable({})


def _kinds(parser: argparse.ArgumentParser, only: str) -> list[TileClass]:
    globs = [glob.strip() for glob in only.split(",")]
    for glob in globs:
        if not any(fnmatchcase(kind.name, glob) for kind in EVERY_CLASS):
            parser.error(f"--only {glob!r} matches no class; they are {', '.join(kind.name for kind in EVERY_CLASS)}")
    return [kind for kind in EVERY_CLASS if any(fnmatchcase(kind.name, glob) for glob in globs)]


def _buckets(parser: argparse.ArgumentParser, lengths: str | None) -> list[Bucket]:
    ladder = standard_ladder()
    if lengths is None:
        return list(ladder)
    wanted = [text.strip() for text in lengths.split(",")]
    for text in wanted:
        if not text.isdecimal() or int(text) < 1:
            parser.error(f"--n {text!r} is no row length; write whole numbers from 1, separated by commas")
    return [bucket for bucket in ladder if any(int(text) in bucket for text in wanted)]


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(prog, _DESCRIPTION)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the table to write, called after the architecture")
    parser.add_argument(
        "--only", default=_ONLY, metavar="GLOB[,GLOB]", help=f"classes to measure, '*' for all (default: {_ONLY})"
    )
    parser.add_argument("--n", metavar="N[,N]", help="measure only the buckets that serve these row lengths")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(os.cpu_count() or 1, _MOST_JOBS),
        help="processes that compile ahead (default: one a core, up to %(default)s); 0: each kernel in its turn",
    )
    return parser
