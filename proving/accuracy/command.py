"""`python -m proving accuracy`: every kernel's error against fp64, beside torch's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from normforge.errors import DeviceError
from normforge.tools.machine import find_machine

from .. import parts
from ..evidence import conclude, parser_of
from .cases import cases
from .report import summary, table, text
from .rows import KINDS
from .run import outcome_of, run


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
    chosen = [case for case in cases(machine.device) if all(word in case.name for word in options.words)]
    if not chosen:
        print(f"no case has {' and '.join(map(repr, options.words))} in its name; --list shows them", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    # Late, because it imports Triton, which has to find the interpreter turned on or off.
    from benchmarks.environment import describe

    header = describe(machine, (), options.revision) | {"seed": str(options.seed)}
    found = parts.run(
        {case.name: case for case in chosen},
        lambda due: run(due, machine, options.seed, options.jobs),
        options,
        header,
    )
    made = outcome_of(found.results)
    conclude(options, "accuracy", table(made, header), summary, left=found.left)
    print(text(made))
    return 0 if made.ok and not found.left else 1


def _parser() -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {name:14} {kind.means}" for name, kind in KINDS.items())
    about = "Measure every kernel's error against fp64, beside torch's."
    parser = parser_of("accuracy", about, f"kinds of rows:\n{kinds}")
    parser.add_argument("words", nargs="*", help="measure only cases with all of these in their names: N=4096, ln_bwd")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and measure nothing")
    parser.add_argument("--seed", type=int, default=0, help="of the rows (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, which share the GPU (default 1)")
    parts.add_options(parser)
    return parser
