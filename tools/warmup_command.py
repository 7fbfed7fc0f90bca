"""`normforge warmup`: compile what a deployment touches for the GPU that is here, or list it."""

from __future__ import annotations

from collections.abc import Sequence

from ..ahead_of_time.compile_keys import find_target, gpu
from ..ahead_of_time.warmup import load
from .asked_keys import keys_for, table_of
from .warmup_options import parse


def main(argv: Sequence[str], prog: str) -> int:
    """Run `normforge warmup`; returns 0.

    Raises:
        NormforgeError: see `warmup`; also for what the arguments name and is not there.
    """
    given = parse(argv, prog)
    keys = keys_for(given, find_target(given.arch))
    if given.list:
        print(table_of(keys))
        return 0
    load(keys, gpu(None), jobs=given.jobs, progress=True)
    print(f"{len(keys)} kernels are compiled")
    return 0
