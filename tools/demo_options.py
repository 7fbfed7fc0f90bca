"""What `normforge demo` is asked for, read without torch: its help and its refusals take no seconds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parse(argv: Sequence[str], prog: str) -> None:
    """Read what follows the verb, which takes no options.

    Raises:
        SystemExit: --help was asked for, or there are arguments; argparse has said so.
    """
    argparse.ArgumentParser(
        prog=prog,
        description="Run a handful of modes and print how far each is from the fp64 reference and, on a GPU, how fast.",
    ).parse_args(argv)
