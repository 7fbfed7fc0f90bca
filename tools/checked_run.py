"""A run of one problem: its kernel on random tensors, compared with the fp64 reference and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from .. import reference
from ..calls import road
from ..calls.functions import completed
from ..calls.outputs import ColumnwiseOutput, LayerNormOutput, QuantisedOutput
from ..codegen.parameters import FORWARD, QUANTISED, RENORMED, family_of
from ..codegen.values import Norm
from ..families import post_add, public
from ..families import statistics as statistics
from ..families.which import which
from ..reference import gated as gating_reference
from ..reference import modulated as modulation_reference
from ..reference import quantised as quantisation_reference
from ..reference import renormed as renorming_reference
from ..reference import statistics as statistics_reference
from ..selection import dispatch
from . import checked_gradients
from .compare import (
    Finding,
    columns_of,
    compare,
    compare_amax,
    compare_columns,
    compare_quantised,
    numbers_of,
    worst_of,
)
from .measured_run import Run, names_of
from .problem import Problem
from .problem_tensors import inputs, poisoned_outputs

_Forward = Callable[..., LayerNormOutput]
_Oracle = Callable[..., reference.ReferenceOutput]

_FORWARD: dict[Norm, tuple[_Forward, _Oracle]] = {
    norm: (getattr(public, name), reference.FORWARD[norm]) for norm, name in FORWARD.functions.items()
}

# By the family's word.
_BESIDE = {
    "statistics": statistics_reference,
    "renormed": renorming_reference,
    "modulated": modulation_reference,
    "gated": gating_reference,
    "quantised": quantisation_reference,
}

# Elements the reference works on at once: in fp64, with its temporaries, a few gigabytes.
REFERENCE_ELEMENTS = 2**26

# The results of quantised norms that have a row for each row of x, but for scales.
_OF_ROWS = ("y", "residual_out", "unquantised", "mean", "rstd", "first_mean", "first_rstd")

# The arguments that have a row for each row of x, or for each sample; every other tensor is one row long and shared.
_ROW_ARGUMENTS = ("x", "residual", "x_scale", "scale", "shift", "gate")


def prepare(problem: Problem, device: torch.device) -> Run[Any]:
    """Make a problem's tensors, so that it can be run on a device.

    Raises:
        NormforgeError: no kernel serves the problem.
    """
    if problem.backward:
        return checked_gradients.prepare(problem, device)
    return (_prepare_beside if family_of(problem.mode).name else _prepare_forward)(problem, device)


def _prepare_forward(problem: Problem, device: torch.device) -> Run[LayerNormOutput]:
    forward, oracle = _FORWARD[problem.mode.norm]
    arguments = inputs(problem, device)
    instance = which(**arguments, norm=problem.mode.norm)
    outputs = poisoned_outputs(problem, device)

    def names() -> tuple[str, str]:
        entry = next(entry for entry in dispatch.instances() if entry.name == instance)
        return names_of(entry, problem.rows, problem.n, device)

    return Run(
        names=names,
        call=lambda: forward(**arguments, **outputs),
        validate=lambda result: validate_rows(problem, oracle, arguments, result),
        operands=tuple(arguments.values()),
    )


def _prepare_beside(problem: Problem, device: torch.device) -> Run[Any]:
    mode, arguments = problem.mode, inputs(problem, device)
    family = family_of(mode)
    function = family.functions[mode.norm]
    oracle = _BESIDE[family.name].FORWARD[mode.norm]
    validate: Callable[..., tuple[Finding, ...]] = validate_quantised if family is QUANTISED else validate_rows
    args, calls = completed(function, arguments), road.ROWS[family.name]
    # The 2d function divides the tensor that holds the statistics of two norms.
    two = family is RENORMED
    call = partial(post_add.forward, outs=(None, None)) if two else partial(road.launched, calls)
    operands = road.operands_of(calls, args)
    options = road.options_of(calls, mode.norm.value, args)
    return Run(
        names=lambda: names_of(dispatch.find(mode, problem.row_length), problem.rows, problem.n, device),
        call=lambda: call(operands, options),
        validate=lambda result: validate(problem, oracle, arguments, result),
        operands=tuple(arguments.values()),
    )


def validate_rows(
    problem: Problem, oracle: _Oracle, arguments: dict[str, Any], result: LayerNormOutput
) -> tuple[Finding, ...]:
    """Return the worst finding of each output, over slices of rows, tokens or samples that the reference can hold."""
    findings: list[Finding] = []
    for rows in _row_slices(problem):
        sliced = arguments | {name: arguments[name][rows] for name in _ROW_ARGUMENTS if name in arguments}
        if problem.mode.dropout:
            # The mask is one of all rows.
            sliced["first_row"] = rows.start * problem.heads
        outputs = result._replace(
            **{name: value[rows] for name, value in result._asdict().items() if value is not None}
        )
        if problem.mode.fadd.renorms:
            # Its second norm is that of the sum as it was stored.
            sliced["stored"] = outputs.residual_out
        findings += compare(outputs, oracle(**sliced), problem.mode.rounding)
    return worst_of(findings)


def validate_quantised(
    problem: Problem,
    oracle: Callable[..., quantisation_reference.ReferenceQuantised],
    arguments: dict[str, Any],
    result: QuantisedOutput | ColumnwiseOutput,
) -> tuple[Finding, ...]:
    """Return the worst finding of each output of a quantised norm, with scales decoded from their storage."""
    findings: list[Finding] = []
    each = problem.m // problem.samples if problem.samples else problem.heads
    largest: list[quantisation_reference.ReferenceQuantised] = []
    columns = amax = None
    if isinstance(result, ColumnwiseOutput):
        amax = result.amax
        columns = None if result.columnwise is None else columns_of(result, problem.mode)
    of_rows = {name: result._asdict().get(name) for name in _OF_ROWS}
    scale, leading = result.y_scale, arguments["x"].shape[:-1]
    if scale is not None:
        size = problem.mode.group_size.code or problem.n
        scale = numbers_of(
            scale, problem.mode, torch.Size((*leading, -(-problem.n // size))), arguments.get("global_scale")
        )
    for rows in _row_slices(problem):
        sliced = arguments | {name: arguments[name][rows] for name in _ROW_ARGUMENTS if name in arguments}
        parts = {name: value[rows] for name, value in of_rows.items() if value is not None}
        if problem.mode.fadd.renorms:
            sliced["stored"] = parts["residual_out"]
        expected = oracle(**sliced)
        findings += compare_quantised(result._replace(**parts), None if scale is None else scale[rows], expected)
        if columns is not None:
            findings += compare_columns(columns, expected, rows.start * each)
        if amax is not None:
            largest.append(expected)
    return worst_of([*findings, *([compare_amax(amax, largest)] if amax is not None else [])])


def _row_slices(problem: Problem) -> Iterator[slice]:
    together, groups = problem.heads, problem.tokens
    if problem.samples:
        together, groups = problem.m // problem.samples, problem.samples
    # Whole blocks of rows: no block has more than 128, but for whole columns, which are a block.
    whole = problem.mode.columnwise.writes and not problem.mode.group_size.code
    some = groups if whole else max(128, REFERENCE_ELEMENTS // (together * problem.n) // 128 * 128)
    for first in range(0, groups, some):
        yield slice(first, first + some)
