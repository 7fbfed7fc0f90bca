"""`python -m proving accuracy`: every kernel's error against fp64, beside torch's."""

from __future__ import annotations

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
        0 if the rule holds, 1 if it does not; the command ends with 2 if nothing could be measured.
    """
    kinds = "\n".join(f"  {name:14} {kind.means}" for name, kind in KINDS.items())
    about = "Measure every kernel's error against fp64, beside torch's."
    parser = parser_of("accuracy", about, f"kinds of rows:\n{kinds}")
    parser.add_argument("--seed", type=int, default=0, help="of the rows (default 0)")
    parts.add_options(parser, jobs=1)
    options = parser.parse_args(arguments)
    try:
        machine = find_machine()
    except DeviceError as problem:
        parser.error(str(problem))
    chosen = parts.chosen({case.name: case for case in cases(machine.device)}, parser, options)
    # Late, because it imports Triton, which has to find the interpreter turned on or off.
    from benchmarks.environment import describe

    header = describe(machine, (), options.revision) | {"seed": str(options.seed)}
    found = parts.run(chosen, lambda due: run(due, machine, options.seed, options.jobs), options, header)
    made = outcome_of(found.results)
    conclude(options, "accuracy", table(made, header), summary, left=found.left)
    print(text(made))
    return 0 if made.ok and not found.left else 1
