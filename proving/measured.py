"""The command line of a proof that measures cases on the machine's device, in parts and in several processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

import torch

from normforge.errors import DeviceError
from normforge.tools.machine import Machine, find_machine

from . import parts

C = TypeVar("C")
R = TypeVar("R")


def measured(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    jobs: int,
    cases: Callable[[Machine], Mapping[str, C]],
    run: Callable[[Sequence[C], torch.device, int, int], Generator[tuple[str, R], None, None]],
) -> tuple[argparse.Namespace, dict[str, str], parts.Found[R]]:
    """Run the cases that a command line asks for.

    Args:
        parser: of the proof; --seed and the options of `parts` are added.
        arguments: of the command line.
        jobs: how many cases run at once by default.
        cases: the machine's cases, by name.
        run: yields the names and results of cases on a device, of a seed, by some processes.

    Returns:
        The options, the header of the results, and the results.
    """
    parser.add_argument("--seed", type=int, default=0, help="of every input (default: %(default)s)")
    parts.add_options(parser, jobs)
    asked = parser.parse_args(arguments)
    try:
        machine = find_machine()
    except DeviceError as problem:
        parser.error(str(problem))
    chosen = parts.chosen(cases(machine), parser, asked)
    # Late, because it imports Triton, which has to find the interpreter turned on or off.
    from benchmarks.environment import describe

    header = describe(machine, (), asked.revision) | {"seed": str(asked.seed)}
    found = parts.run(chosen, lambda due: run(due, machine.device, asked.seed, asked.jobs), asked, header)
    return asked, header, found
