"""A run of one problem: its kernel on random tensors, held against the fp64 reference and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import api, dispatch, reference
from .codegen.model import Norm
from .compare import Finding, compare
from .machine import Machine
from .output import LayerNormOutput
from .problem import Problem, inputs, poisoned_outputs
from .result import Result
from .solve_backward import solve_backward
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
    if problem.backward:
        return solve_backward(problem, machine, validate=validate, warmup=warmup, repeat=repeat)
    forward, oracle = _FORWARD[problem.norm]
    arguments = inputs(problem, machine.device)
    instance = api.which(**arguments, norm=problem.norm)
    outputs = poisoned_outputs(problem, machine.device)

    def call() -> LayerNormOutput:
        return forward(**arguments, **outputs)

    begin = time.perf_counter()
    result = call()
    interpreted_ms = (time.perf_counter() - begin) * 1e3
    findings = _validate(problem, oracle, arguments, result) if validate else ()
    ms = interpreted_ms if machine.interpreted else median_ms(call, warmup=warmup, repeat=repeat)
    kernel = next(entry.kernel for entry in dispatch.instances() if entry.name == instance)
    return Result(instance, kernel, findings, ms, None if machine.interpreted else _bytes(arguments, result) / ms / 1e6)


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


def _bytes(arguments: dict[str, Any], result: LayerNormOutput) -> int:
    """Bytes a run moves: every tensor read or written, once."""
    tensors = [value for value in (*arguments.values(), *result) if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
