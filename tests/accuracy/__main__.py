"""`python -m tests.accuracy`: every kernel's error against fp64, beside torch's."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from tqdm import tqdm

from normforge.errors import DeviceError
from normforge.machine import Machine, find_machine

from .cases import Case, cases, matching
from .measure import Cell, measure
from .report import Outcome, markdown, text


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for.

    Returns:
        0 if the rule holds, 1 if it does not, 2 if nothing could be measured.
    """
    options = _parser().parse_args(arguments)
    try:
        machine = find_machine()
    except DeviceError as problem:
        print(problem, file=sys.stderr)
        return 2
    chosen = matching(cases(machine.device), options.words)
    if not chosen:
        print(f"no case has {' and '.join(map(repr, options.words))} in its name; --list shows them", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    outcome = run(chosen, machine, options.seed, options.jobs)
    print(text(outcome))
    if options.markdown is not None:
        # Late, because it imports Triton, which has to find the interpreter turned on or off.
        from benchmarks.environment import describe

        header = describe(machine, (), options.revision) | {"seed": str(options.seed)}
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(markdown(outcome, header, "python -m tests.accuracy --markdown docs/numerics.md"))
    return 0 if outcome.ok else 1


def run(chosen: Sequence[Case], machine: Machine, seed: int, jobs: int) -> Outcome:
    """Measure cases, in as many processes."""
    cells: dict[Case, list[Cell]] = {}
    broken: dict[Case, str] = {}
    for case, found in tqdm(_each(chosen, machine, seed, jobs), total=len(chosen), unit=" cases", file=sys.stderr):
        if isinstance(found, str):
            broken[case] = f"{case.name}: {found}"
        else:
            cells[case] = found
    # In the order of the cases, whichever process was first.
    return Outcome(
        [cell for case in chosen for cell in cells.get(case, ())], [broken[case] for case in chosen if case in broken]
    )


def _each(chosen: Sequence[Case], machine: Machine, seed: int, jobs: int) -> Iterator[tuple[Case, list[Cell] | str]]:
    if jobs == 1:
        for case in chosen:
            yield case, attempt(case, machine.device, seed)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(attempt, case, machine.device, seed): case for case in chosen}
        for done in as_completed(pending):
            yield pending[done], done.result()


def attempt(case: Case, device: torch.device, seed: int) -> list[Cell] | str:
    """A case's cells, or why it did not run."""
    try:
        return measure(case, device, seed)
    except Exception as problem:
        # A tile that needs more registers or shared memory than there are, say: told with the others, at the end.
        lines = str(problem).splitlines()
        return f"{type(problem).__name__}: {lines[0] if lines else 'no message'}"
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.accuracy", description="Measure every kernel's error against fp64, beside torch's."
    )
    parser.add_argument("words", nargs="*", help="measure only cases with all of these in their names: N=4096, ln_bwd")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and measure nothing")
    parser.add_argument("--seed", type=int, default=0, help="of the rows (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, which share the GPU (default 1)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the document there, docs/numerics.md say")
    parser.add_argument("--revision", help="what the document calls this revision (default: git's)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
