"""Forward kernels of several modes in one launch: the kernel that calls them, by its name and parameters.

The first dimension of the grid is the programs of the problem that has most, and the second dimension is the problems.
What is written comes last: JAX passes operands before results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from .model import Mode
from .parameters import family_of
from .signature import Param, params
from .values import SEVERAL, Pipeline

# The kernels of the problems, in order.
Kernels = Sequence[tuple[Mode, Pipeline]]

# A file name may have 255 bytes: the digest of a compiled kernel and the ends of temporary files come behind a symbol.
_LONGEST = 180

# The constant of an early start is one for all problems.
_SHARED = "PDL"


def suffix(at: int) -> str:
    """Return what the parameters of a problem end in, given its index; those of the first have a kernel's own names."""
    return f"_{at + 1}" if at else ""


def name_of(kernels: Kernels) -> str:
    """Return the name of the module and of the kernel that calls some kernels; long names are abridged by a digest."""
    runs = [(name, len(list(run))) for name, run in groupby(mode.kernel(part) for mode, part in kernels)]
    name = "_and_".join([SEVERAL, *[name if count == 1 else f"{name}_x{count}" for name, count in runs]])
    name = name.replace("_and_", "_", 1)
    return name if len(name) <= _LONGEST else f"{SEVERAL}_{hashlib.sha256(name.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Problem:
    """One of the problems of a launch.

    Attributes:
        at: the index, which is the program's in the second dimension of the grid.
        kernel: the name of the kernel that serves the problem.
        reads: the parameters that the problem adds to the kernel that calls others, but for those of `writes`.
        writes: the tensors that the problem writes.
        arguments: the names that the problem's kernel is called with, in order.
        programs: the name of the parameter that holds how many programs the problem has.
    """

    at: int
    kernel: str
    reads: list[Param]
    writes: list[Param]
    arguments: list[str]
    programs: str


def problems_of(kernels: Kernels) -> list[Problem]:
    """Return the problems of a launch."""
    return [_problem(at, mode, part) for at, (mode, part) in enumerate(kernels)]


def _problem(at: int, mode: Mode, part: Pipeline) -> Problem:
    reads: list[Param] = []
    writes: list[Param] = []
    arguments, end, written = [], suffix(at), {row.slot for row in family_of(mode).results}
    for param in params(mode, part):
        name, _, annotation = param.declaration.partition(":")
        ending = "" if name == _SHARED else end
        arguments.append(name + ending)
        if end == ending:
            own = replace(param, declaration=f"{name}{end}{':' if annotation else ''}{annotation}")
            (writes if name in written else reads).append(own)
    programs = f"programs{end}"
    reads.append(Param(programs, "how many programs walk these rows"))
    return Problem(at, mode.kernel(part), reads, writes, arguments, programs)
