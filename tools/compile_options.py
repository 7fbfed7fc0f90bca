"""The arguments that `normforge warmup` and `normforge aot` share: which compilations.

Imports no torch, so that help and refusals take no seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..call_kinds import ROWS, USUAL_ROWS
from ..codegen.axes import SAME
from ..codegen.command import options_given
from ..codegen.values import INPUT_DTYPES

if TYPE_CHECKING:
    from ..ahead_of_time.row_places import Asked, Steps

ABSENT = "none"

_KINDS = (SAME, *(dtype.value for dtype in INPUT_DTYPES), ABSENT)


def add_key_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    parser.add_argument(
        "modes",
        nargs="*",
        metavar="MODE",
        help="names of modes, as instances begin (ln_fwd_bf16), or globs of such; default: every mode that serves N",
    )
    parser.add_argument("--n", type=_lengths, default=(), metavar="N[,N]", help="row lengths")
    parser.add_argument(
        "--shape",
        type=_shapes,
        default=(),
        metavar="SHAPE[,SHAPE]",
        help="of GroupNorm, x's with how many groups a sample has: 2x320x64x64/32; *x320x64x64/32 for any batch",
    )
    parser.add_argument(
        "--recorded",
        action="append",
        type=Path,
        metavar="FILE",
        help="instead of modes, sizes and what calls bring: the kernels of the calls that NORMFORGE_RECORD wrote here; "
        "may be given several times",
    )
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="take the modes of this manifest instead")
    parser.add_argument(
        "--instances",
        type=Path,
        metavar="DIR",
        help="the folder of kernels in use at run time (default: NORMFORGE_INSTANCES, or normforge's own)",
    )
    kinds = parser.add_argument_group(
        "what calls bring", f"dtypes are some of {', '.join(_KINDS)}, separated by commas; {SAME} is x's"
    )
    present = tuple(word for word in _KINDS if word != ABSENT)
    add: Callable[..., Any] = partial(kinds.add_argument, metavar="DTYPE[,DTYPE]")
    add("--weight", type=partial(_words, _KINDS), default=SAME, help=f"weight's, or {ABSENT} (default: {SAME})")
    add("--bias", type=partial(_words, _KINDS), help=f"bias's, or {ABSENT} (default: weight's)")
    add("--residual", type=partial(_words, present), default=SAME, help=f"residual's (default: {SAME})")
    add("--smooth", type=partial(_words, present), default="fp32", help="smooth_scale's (default: fp32)")
    add("--dy", type=partial(_words, present), default=SAME, help=f"the incoming gradient's (default: {SAME})")
    add("--y", type=partial(_words, present), default=SAME, help=f"GroupNorm's y's (default: {SAME})")
    kinds.add_argument(
        "--row-stride",
        type=_strides,
        metavar="STRIDES[,STRIDES]",
        help="elements from one row of x to the next, besides N (rows that adjoin); 6144x32x128 for groups "
        "of 32 rows, 128 apart in a group and the groups 6144; of other tensors by name: x=6144x32x128+out=6144x32x128",
    )
    kinds.add_argument(
        "--rows",
        type=partial(_words, ROWS),
        metavar="CLASS[,CLASS]",
        help=f"numbers of rows, or of groups: {', '.join(ROWS)}, the last more than an i32 counts "
        f"(default: {','.join(USUAL_ROWS)}, or those at which calls were recorded)",
    )
    parser.add_argument("--jobs", type=_jobs, metavar="J", help="threads that compile (default: one a core, up to 8)")


# What goes with recorded calls: where kernels come from and go to, and not what calls bring.
_BESIDE_RECORDED = {"instances", "rows", "jobs", "arch", "out", "multiprocessors", "framework"}


def parse_keys(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line with those arguments, or print what is wrong with it and exit with status 2."""
    given = parser.parse_args(argv)
    if given.recorded is not None:
        beside = [f"--{name.replace('_', '-')} is" for name in sorted(options_given(given) - _BESIDE_RECORDED)]
        beside += ["modes are"] if given.modes else []
        if beside:
            parser.error(f"{beside[0]} given beside --recorded, and recordings say what calls bring; leave one out")
        return given
    if given.manifest is not None and given.modes:
        parser.error("modes are named, and --manifest too; leave one of them out")
    if not (given.n or given.shape):
        parser.error(
            "there are no sizes; pass row lengths, --n 4096 say, or --shape 2x320x64x64/32 of GroupNorm, or what was "
            "recorded: --recorded FILE"
        )
    return given


def _lengths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers from 1, separated by commas")
    return tuple(dict.fromkeys(map(int, parts)))


def _shapes(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _strides(text: str) -> tuple[Asked, ...]:
    return tuple(_steps_by_name(part) if "=" in part else _steps(part) for part in text.split(","))


def _steps_by_name(text: str) -> dict[str, Steps]:
    named = [part.partition("=") for part in text.split("+")]
    return {name.strip(): _steps(steps) for name, _, steps in named}


def _steps(text: str) -> Steps:
    parts = [part.strip() for part in text.split("x")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no stride, or strides with the rows between them: 6144x32x128")
    steps = tuple(map(int, parts))
    return steps if len(steps) > 1 else steps[0]


def _words(known: Sequence[str], text: str) -> tuple[str, ...]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in known:
            raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(known)}")
    return tuple(dict.fromkeys(parts))


def _jobs(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads; it takes 1 or more")
    return int(text)
