"""A run of one problem: its kernel on random tensors, held against the fp64 reference and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import reference
from ..calls import api
from ..calls.outputs import LayerNormOutput
from ..codegen.model import Norm
from ..kernels.architecture import architecture
from ..selection import dispatch
from .compare import Finding, compare
from .machine import Machine
from .problem import Problem, inputs, poisoned_outputs
from .result import Result, Run
from .solve_backward import prepare_backward
from .timing import median_ms

_Forward = Callable[..., LayerNormOutput]
_Oracle = Callable[..., reference.ReferenceOutput]

_FORWARD: dict[Norm, tuple[_Forward, _Oracle]] = {
    Norm.LAYER: (api.layernorm2d_fwd, reference.layernorm2d_fwd),
    Norm.RMS: (api.rmsnorm2d_fwd, reference.rmsnorm2d_fwd),
}

# Elements the reference works on at once: in fp64, with its temporaries, a few gigabytes.
REFERENCE_ELEMENTS = 2**26

# The arguments that have a row for each row of x; every other tensor is one row long and shared.
_ROW_ARGUMENTS = ("x", "residual")


def solve(problem: Problem, machine: Machine, *, validate: bool, warmup: int, repeat: int) -> Result:
    """Run a problem's kernel on random tensors, hold it against the fp64 reference, and time it.

    Raises:
        NormforgeError: whatever the call raises; an axis combination that no kernel serves, say.
    """
    run = prepare(problem, machine.device)
    begin = time.perf_counter()
    outputs = run.call()
    interpreted_ms = (time.perf_counter() - begin) * 1e3
    findings = run.validate(outputs) if validate else ()
    ms = interpreted_ms if machine.interpreted else median_ms(run.call, warmup=warmup, repeat=repeat)
    entry = run.entry()
    tile = entry.tile(problem.m, architecture(machine.device))
    rate = None if machine.interpreted else run.moved(outputs) / ms / 1e6
    return Result(entry.name, entry.kernel(tile.pipeline), findings, ms, rate)


def prepare(problem: Problem, device: torch.device) -> Run[Any]:
    """Make a problem's tensors, so that it can be run on a device.

    Raises:
        NormforgeError: no kernel serves the problem.
    """
    return prepare_backward(problem, device) if problem.backward else _prepare_forward(problem, device)


def _prepare_forward(problem: Problem, device: torch.device) -> Run[LayerNormOutput]:
    forward, oracle = _FORWARD[problem.norm]
    arguments = inputs(problem, device)
    instance = api.which(**arguments, norm=problem.norm)
    outputs = poisoned_outputs(problem, device)
    return Run(
        entry=lambda: next(entry for entry in dispatch.instances() if entry.name == instance),
        call=lambda: forward(**arguments, **outputs),
        validate=lambda result: _validate(problem, oracle, arguments, result),
        operands=tuple(arguments.values()),
    )


def _validate(
    problem: Problem, oracle: _Oracle, arguments: dict[str, Any], result: LayerNormOutput
) -> tuple[Finding, ...]:
    """The worst finding of each output, over slices of rows that the reference can hold in memory."""
    worst: dict[str, Finding] = {}
    for rows in _row_slices(problem):
        sliced = arguments | {name: arguments[name][rows] for name in _ROW_ARGUMENTS if name in arguments}
        outputs = result._replace(
            **{name: value[rows] for name, value in result._asdict().items() if value is not None}
        )
        for found in compare(outputs, oracle(**sliced)):
            so_far = worst.setdefault(found.name, found)
            worst[found.name] = Finding(
                found.name,
                max(so_far.error, found.error),
                max(so_far.tolerance, found.tolerance),
                so_far.ok and found.ok,
            )
    return tuple(worst.values())


def _row_slices(problem: Problem) -> Iterator[slice]:
    rows = max(1, REFERENCE_ELEMENTS // problem.n)
    for first in range(0, problem.m, rows):
        yield slice(first, first + rows)
