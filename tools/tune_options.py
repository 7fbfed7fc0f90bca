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
