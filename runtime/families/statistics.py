"""Calls for the statistics of rows alone, the mean and rstd that a norm saves: the row of the family."""

from __future__ import annotations

from typing import Any

import torch

from ..calls import road
from ..calls.backend import backend, left_to_torch
from ..calls.check import check_normalised, check_tensor
from ..calls.first import resolved
from ..calls.record import Launched, Recording, record, records
from ..calls.road import Operands, Options, calls_of
from ..calls.traced import becomes_operator, intercepted, is_dynamo_compiling, operated, unrecorded
from ..codegen.parameters import STATISTICS
from ..errors import ShapeError
from ..selection.invariance import is_on
from . import eager
from .operands import DEFAULT_EPS
from .plain_calls import handed_on, is_handed_on

# The mean, if the norm subtracts one, and rstd.
Statistics = tuple["torch.Tensor | None", torch.Tensor]


def _run(operands: Operands, options: Options) -> Statistics:
    """Launch the kernel of a checked call, or call the operator if something sees operators."""
    if is_dynamo_compiling() or intercepted(*operands):
        means_and_rstd = operated(CALLS.functions[options[0]], road.named(CALLS, operands, options))
        return None if len(means_and_rstd) == 1 else means_and_rstd[0], means_and_rstd[-1]
    _, _, _, mean, rstd = road.launched(CALLS, operands, options)
    return mean, rstd


def _returned(statistics: Statistics) -> Any:
    mean, rstd = statistics
    return rstd if mean is None else (mean, rstd)


def _launch_recorded(options: Options, operands: Operands) -> Launched:
    mean, rstd = _run(operands, options)
    first, second = (rstd, None) if mean is None else (mean, rstd)
    return first, second, (*operands, mean, rstd), None, is_on()


CALLS = calls_of(
    STATISTICS,
    saved=lambda operands, mean: (*operands, mean),
    args=lambda *_: None,
    recording=Recording(_launch_recorded, eager.statistics_gradients, sums=(0,)),
)


def compute(operands: Operands, options: Options) -> Any:
    """Run a call of a public function: return rstd, and before it the mean if the norm subtracts one."""
    if is_handed_on(operands):
        args = road.named(CALLS, operands, options)
        return handed_on(CALLS.functions[options[0]], operands, args, positional=1)
    (x,), (norm, eps) = operands, options
    check_tensor("x", x)
    options = (norm, DEFAULT_EPS if eps is None and norm == "rms" else eps)
    seen = is_dynamo_compiling() or intercepted(x) or records(operands)
    planned = None if seen else CALLS.find(operands, options)[1]
    if planned is not None:
        return _returned(CALLS.launch(planned, options, (None, None, None))[3:])
    if not x.dim():
        raise ShapeError(f"x has shape {tuple(x.shape)}; it takes (..., N), one dimension or more")
    kernel = backend(x) == "kernel" and not left_to_torch(operands)
    with unrecorded():
        args = road.named(CALLS, operands, options)
        check_normalised(CALLS.functions[norm], args, x.shape[-1:], kernel=kernel)
    options = (norm, float(options[1]))
    if not kernel:
        return _returned(eager.statistics(norm, x, options[1]))
    rows = road.as_operands((resolved(x),), 1)
    if records(rows) and not becomes_operator(*rows):
        return record((CALLS.recording, options), *rows)
    return _returned(_run(rows, options))
