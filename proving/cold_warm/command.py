"""The command: python -m proving cold_warm."""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
import warnings
from itertools import product


def main(argv: list[str]) -> int:
    """Compare calls, and return 1 if one depends on what ran before."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("NORMFORGE_CACHE", tempfile.mkdtemp(prefix="normforge-cold-warm-"))
    import torch

    from .compare import FAMILIES, run
    from .surroundings import one_rank

    parser = argparse.ArgumentParser(
        prog="python -m proving cold_warm",
        description="Compare each call of random sequences with the same call after all caches were dropped.",
    )
    parser.add_argument("--calls", type=int, default=2000, help="how many, over all families (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=time.time_ns() // 1000 % 10**6, help="repeats a run")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only calls of it; may be repeated")
    asked = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    print(f"--seed {asked.seed}", flush=True)
    chosen = asked.family or FAMILIES
    count = -(-asked.calls // (2 * len(chosen)))
    faults, started = 0, time.monotonic()
    with one_rank():
        for family, by_address in product(chosen, (False, True)):
            result = run(family, asked.seed, count, by_address=by_address)
            faults += len(result.differences)
            print(*result.differences, sep="\n", end="\n" * bool(result.differences))
            how = "by address" if by_address else "by tensor"
            seconds = time.monotonic() - started
            print(f"{family}, {how}: {count} calls, {result.served} served; {seconds:.0f} s", flush=True)
    print(f"{faults} differences; --seed {asked.seed} repeats them" if faults else "no differences")
    return int(bool(faults))
