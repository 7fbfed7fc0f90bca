"""The command: python -m proving cold_warm."""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
import warnings


def main(argv: list[str]) -> int:
    """Compare calls, and return 1 if one depends on what ran before."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("NORMFORGE_CACHE", tempfile.mkdtemp(prefix="normforge-cold-warm-"))
    import torch

    from .compare import FAMILIES, Difference, run
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
    faults, started = 0, time.monotonic()
    with one_rank():
        for family in chosen:
            for by_address in (False, True):
                told = None
                for told in run(family, asked.seed, -(-asked.calls // (2 * len(chosen))), by_address=by_address):
                    if isinstance(told, Difference):
                        faults += 1
                        print(told, flush=True)
                if told is not None and not isinstance(told, Difference):
                    seconds = time.monotonic() - started
                    how = "by address" if by_address else "by tensor"
                    print(f"{family}, {how}: {told.calls} calls, {told.served} served; {seconds:.0f} s", flush=True)
    print(f"{faults} differences; --seed {asked.seed} repeats them" if faults else "no differences")
    return int(bool(faults))
