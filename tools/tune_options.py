"""The arguments of `normforge tune`, read without torch, so that help and refusals take no seconds."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

from ..codegen.command import Parser
from ..codegen.instance import Bucket
from ..codegen.tiling import EVERY_CLASS, TileClass, standard_ladder

# The classes that most models run; other classes of rows take as long again.
_ONLY = "fwd_16bit*,bwd_16bit*"
_MOST_JOBS = 16

_DESCRIPTION = """\
Measure candidate tiles on this GPU, and print the fastest beside the tile in use now. A range of row lengths is
measured at its longest row; for many and for some rows also a quarter up the range, at a length that fills no chunk.
Ragged rows are measured at that length alone.

With --out, the winners are written into a table for the generator: python generate.py --tiles FILE. The generator
reads tables in codegen/tiles/ of a checkout without --tiles. Rows of the table for other classes and lengths stay, and
so does its leading comment. With --sizes, only rows that the table has are measured, and their other tiles stay.

A row of the table is a class and a range of row lengths. Each row is written as soon as it is measured, and all times
go to a report. A run that is interrupted, or stops after --minutes, loses no row; --resume goes on. Classes and lengths
are measured in the order of --only and --n.
Exit status: 0 done, 1 some row has no tile that runs here or no time was left, 2 the request cannot be carried out.
"""


class Size(Enum):
    """Sizes of M that a tile is sought for, as `Tiles` calls them."""

    LARGE = "large"
    SMALL = "small"
    INVARIANT = "invariant"
    SOME = "some"
    RAGGED = "ragged"

    @property
    def candidates(self) -> tuple[bool, ...]:
        """Which candidates the size has: for few rows (True), for many, or both."""
        return {Size.LARGE: (False,), Size.SMALL: (True,), Size.RAGGED: (False,)}.get(self, (False, True))

    @property
    def yields(self) -> bool:
        """True if the tile for many rows serves unless another tile is faster."""
        return self in (Size.SOME, Size.RAGGED)


@dataclass(frozen=True)
class Request:
    """A request of the command line.

    Attributes:
        parser: what read the command line, and refuses what turns out later.
        arguments: the options as they are.
        kinds: the classes of rows to measure, in order.
        buckets: the row lengths to measure, in order.
        sizes: the sizes of M to measure.
    """

    parser: argparse.ArgumentParser
    arguments: argparse.Namespace
    kinds: tuple[TileClass, ...]
    buckets: tuple[Bucket, ...]
    sizes: tuple[Size, ...]


def parse(argv: Sequence[str], prog: str) -> Request:
    """Read what follows the verb.

    Raises:
        SystemExit: --help was asked for, or the arguments are no command; argparse has said so.
    """
    request: Request = parser(prog).request(argv)
    return request


def _resolve(parser: Parser, arguments: argparse.Namespace) -> Request:
    if arguments.minutes is not None and not (math.isfinite(arguments.minutes) and arguments.minutes > 0):
        parser.error(f"--minutes {arguments.minutes} is no time; write a number above 0, 30 or 0.5, say")
    if arguments.resume and arguments.out is None and arguments.report is None:
        parser.error("--resume goes on with what a run wrote; name that with --out FILE, or with --report FILE")
    buckets, sizes = _buckets(parser, arguments.n), _sizes(parser, arguments)
    return Request(parser, arguments, tuple(_kinds(parser, arguments.only)), tuple(buckets), sizes)


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


def parser(prog: str) -> Parser:
    """Return the parser of `normforge tune`."""
    parser = Parser(prog, _DESCRIPTION, resolve=_resolve)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the table to write, named after the architecture")
    parser.add_argument(
        "--only", default=_ONLY, metavar="GLOB[,GLOB]", help=f"classes to measure, '*' for all (default: {_ONLY})"
    )
    parser.add_argument(
        "--sizes",
        metavar="SIZE[,SIZE]",
        help="measure only tiles for these sizes of M, in rows that --out has, and keep the other tiles: "
        f"{', '.join(size.value for size in Size)}",
    )
    parser.add_argument("--n", metavar="N[,N]", help="measure only the ranges that hold these row lengths")
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="stop after M minutes, compiling included, and list what is left"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="skip rows that a run with the same GPU, versions and revision wrote into --out or --report",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="the file for all times, one JSON object per row of the table (default: beside --out, ending in .jsonl)",
    )
    parser.add_argument("--revision", help="the revision that the table states (default: git's)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(os.cpu_count() or 1, _MOST_JOBS),
        help="processes that compile ahead (default: one per core, up to %(default)s); 0: compile each when measured",
    )
    return parser
