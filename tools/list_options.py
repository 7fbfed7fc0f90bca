"""What `normforge list` is asked for, read without torch: its help and its refusals take no seconds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..codegen.command import Parser
from ..codegen.instance import ANY
from ..codegen.tile_tables import is_architecture


def parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    """Read what follows the verb.

    Raises:
        SystemExit: --help was asked for, or the arguments are no command; argparse has said so.
    """
    return options(argv, prog)[1]


def options(argv: Sequence[str], prog: str) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Return what `parse` does, and the parser, which refuses what the table lacks."""
    parser = Parser(
        prog, "Print the dispatch table in use: normforge's own, or that of the folder in NORMFORGE_INSTANCES."
    )
    parser.add_argument("globs", nargs="*", metavar="GLOB", help="show only instances whose name matches one of these")
    parser.add_argument(
        "--arch", default=ANY, help="the tiles of this architecture, sm_90 say (default: of those without their own)"
    )
    arguments = parser.parse_args(argv)
    arch = arguments.arch
    if arch != ANY and not is_architecture(arch):
        parser.error(f"--arch {arch!r} is no architecture; write one like sm_90 or gfx942, or leave --arch out")
    return parser, arguments
