"""Norms with a neighbour as operators; the backward pass of those in a traced graph is torch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..calls import neighbours
from ..calls.check import check
from ..calls.eager import dtypes_of
from ..calls.first import refuse_foreign
from ..calls.functions import FUNCTIONS
from ..calls.neighbour_rows import CALLS
from ..calls.outputs import LayerNormOutput, QuantisedOutput
from ..calls.record import gradients_of
from ..calls.traced import intercepted, operated
from ..dtypes import FLOATS
from .gradients import UNSAVED, kept_too_little
from .twins import register_autograd


def run(function: str, given: dict[str, Any]) -> LayerNormOutput | QuantisedOutput:
    """What an operator computes of its arguments by name."""
    takes = FUNCTIONS[function]
    refuse_foreign(takes.family, given)
    calls = CALLS[takes.neighbour]
    options = neighbours.options_of(calls, takes.norm.value, given)
    found: LayerNormOutput | QuantisedOutput = neighbours.launched(calls, neighbours.operands_of(calls, given), options)
    return found


def run_named(*, function: str, **given: Any) -> Sequence[torch.Tensor | None]:
    """The same of arguments that are passed by name, as an operator if somebody is to see one; see `intercepted`."""
    takes = FUNCTIONS[function]
    if not intercepted(*[given[name] for name, _, _ in takes.tensors]):
        return run(function, given)
    wants = check(function, given, addressed=False).wants
    made = iter(operated(function, given))
    return [next(made) if row.name in wants else None for row in takes.family.results]


def register(library: torch.library.Library, namespace: str, function: str) -> None:
    """Give a norm's operator what differentiates it."""
    takes = FUNCTIONS[function]
    calls = CALLS[takes.neighbour]
    recording = calls.recording
    assert recording is not None

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        given = dict(zip(takes.passed, inputs, strict=True))
        ctx.set_materialize_grads(False)
        operands = neighbours.operands_of(calls, given)
        options = neighbours.options_of(calls, takes.norm.value, given)
        ctx.saves, ctx.adds = given["save_mv"], given.get("residual") is not None
        ctx.args = calls.args(options, dtypes_of(operands))
        summed = [operands[at] for at in recording.sums]
        sum_is_due = ctx.adds and any(tensor is not None and tensor.requires_grad for tensor in summed)
        differentiable = 2 if sum_is_due else 1
        # What is quantised has no gradient, though torch takes fp8 for floats.
        ctx.mark_non_differentiable(*output[differentiable if output[0].dtype in FLOATS else 0 :])
        if ctx.saves:
            *mean, rstd = output[-2 if takes.norm.centres else -1 :]
            saved = calls.saved(operands, output[1] if ctx.adds else None)
            ctx.save_for_backward(*saved, *(mean or (None,)), rstd)

    def differentiate(ctx: Any, arrived: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        if not ctx.saves:
            raise kept_too_little(UNSAVED)
        due = dict(zip(takes.passed, ctx.needs_input_grad, strict=True))
        dresidual_out = arrived[1] if ctx.adds else None
        wanted = tuple([due.get(name, False) for name in calls.inputs])
        *saved, mean, rstd = ctx.saved_tensors
        found = gradients_of(recording, (*saved, (mean, rstd)), ctx.args, arrived[0], dresidual_out, wanted)
        by_name = dict(zip(calls.inputs, found, strict=True))
        return tuple([by_name.get(name) for name in takes.passed])

    register_autograd(namespace, function, differentiate, keep, library)
