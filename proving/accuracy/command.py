"""`python -m proving accuracy`: every kernel's error against fp64, beside torch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from normforge.tools.machine import Machine

from ..evidence import conclude, parser_of
from ..measured import measured
from .cases import AnyCase, cases
from .report import outcome_of, summary, table
from .rows import KINDS
from .run import run


def _named(machine: Machine) -> Mapping[str, AnyCase]:
    return {case.name: case for case in cases(machine.device)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for.

    Returns:
        0 if the rule holds, 1 if it does not; the command ends with 2 if nothing could be measured.
    """
    kinds = "\n".join(f"  {name:14} {kind.means}" for name, kind in KINDS.items())
    about = "Measure every kernel's error against fp64, beside torch's."
    parser = parser_of("accuracy", about, f"kinds of rows:\n{kinds}")
    options, header, found = measured(parser, arguments, 1, _named, run)
    made = outcome_of(found.results)
    conclude(options, "accuracy", table(made, header), summary, left=found.left)
    print(*made.failing, *made.broken, sep="\n")
    return 0 if made.ok and not found.left else 1
