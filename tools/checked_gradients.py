"""Backward passes of one problem on random tensors, compared with the fp64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch

from .. import reference
from ..calls import road
from ..calls.check import check
from ..calls.functions import completed
from ..calls.outputs import NormGradients, QuantisedGradients, QuantisedOutput, dtypes_of
from ..calls.record import BackwardPass
from ..codegen.families import Kind
from ..codegen.model import Mode
from ..codegen.parameters import BACKWARD, FORWARD, QUANTISED_BWD, family_of
from ..dtypes import TORCH_DTYPES
from ..families import public
from ..families.gated import row as gated
from ..families.modulated import row as modulated
from ..families.operands import GatedSaved, ModulatedSaved
from ..reference import gated as gating_reference
from ..reference import modulated as modulation_reference
from ..reference import quantised as quantisation_reference
from ..selection import dispatch
from .compare import (
    Finding,
    GatedGradients,
    ModulatedGradients,
    columns_of,
    compare_columns,
    compare_gradients,
    compare_quantised,
    numbers_of,
)
from .measured_run import Run, names_of
from .problem import Problem
from .problem_tensors import gradients_in, inputs


def prepare(problem: Problem, device: torch.device) -> Run[Any]:
    """Run a problem forward for its statistics, and make every gradient it has ready to be computed.

    Raises:
        NormforgeError: whatever the forward call raises, or no kernel serves the problem.
    """
    if problem.mode.modulated:
        return _prepare_modulated(problem, device)
    return (_prepare_gated if problem.mode.gating.gates else _prepare_plain)(problem, device)


def _prepare_plain(problem: Problem, device: torch.device) -> Run[NormGradients | QuantisedGradients]:
    """Prepare the backward pass of a norm that is neither gated nor modulated.

    The gradients of a fused add are those of the stored sum, which the backward kernel reads. The sum includes x_bias
    already: an x_bias of zeros makes the kernel sum dx over rows before rounding, as in autograd's calls. A mode with
    columns quantises dx, and y of the forward pass stays in 16 bits.
    """
    quantised, family = problem.mode, QUANTISED_BWD if problem.mode.columnwise.writes else BACKWARD
    if family is QUANTISED_BWD:
        mode = Mode(quantised.norm, quantised.dtype_in, quantised.dtype_in, fadd=quantised.fadd, cast=quantised.cast)
        problem = replace(problem, mode=mode)
    arguments, mode = inputs(problem, device), problem.mode
    forward = getattr(public, FORWARD.functions[mode.norm])(**arguments | {"save_mv": True})
    operands: dict[str, Any] = {"x": arguments["x"], "weight": arguments["weight"], "rstd": forward.rstd}
    if mode.norm.centres:
        operands["mean"] = forward.mean
    if mode.fadd.stores:
        operands["x"] = forward.residual_out
    if mode.x_bias:
        operands["x_bias"] = torch.zeros_like(arguments["x_bias"]) if mode.fadd.stores else arguments["x_bias"]
    operands |= gradients_in(problem, device)
    operands |= {row.name: getattr(mode, row.axis) for row in BACKWARD.of(mode.norm) if row.kind is Kind.WORD}
    wants = ["dx", "dweight", *(["dbias"] if mode.norm.centres else []), *(["dx_bias"] if "x_bias" in operands else [])]
    if mode.dropout:
        operands |= {name: arguments[name] for name in ("dropout_p", "dropout_rng")}
        wants.append("ddropped")
    form: dict[str, Any] = {}
    if family is QUANTISED_BWD:
        axes = ("group_size", "scale_format", "columnwise")
        form = {axis: getattr(quantised, axis) for axis in axes} | {"scale_layout": problem.scale_layout}
        form["out_dtype"] = TORCH_DTYPES[quantised.dtype_out]
    run = getattr(public, family.functions[mode.norm])

    oracle = reference.BACKWARD[mode.norm]

    def validate(gradients: NormGradients | QuantisedGradients) -> tuple[Finding, ...]:
        both_ways = []
        if isinstance(gradients, QuantisedGradients):
            both_ways = _compare_both_ways(gradients, quantised)
            gradients = NormGradients(gradients.dx, gradients.dweight, gradients.dbias, None)
        return (*compare_gradients(gradients, oracle(**operands), wants), *both_ways)

    taken = check(family.functions[mode.norm], operands | form).mode
    return Run(
        names=lambda: names_of(dispatch.find(taken, problem.n), problem.rows, problem.n, device),
        call=partial(run, **operands, **form, wants=wants),
        validate=validate,
        operands=tuple(operands.values()),
    )


def _compare_both_ways(gradients: QuantisedGradients, mode: Mode) -> list[Finding]:
    """Hold dx quantised along rows and along columns against dx as it was returned."""
    dx, rowwise = gradients.dx.flatten(0, -2), gradients.rowwise.flatten(0, -2)
    form: dict[str, Any] = {
        "group_size": mode.group_size,
        "scale_format": mode.scale_format,
        "out_dtype": rowwise.dtype,
    }
    expected = quantisation_reference.quantised_by(_unchanged, dx, **form)
    scale = numbers_of(gradients.rowwise_scale, mode, expected.amax.shape).reshape(expected.amax.shape)
    found = compare_quantised(QuantisedOutput(rowwise, None, None, None), scale, expected)
    names = {"y": "rowwise", "y_scale": "rowwise_scale"}
    by_row = [finding._replace(name=names[finding.name]) for finding in found]
    return [*by_row, *compare_columns(columns_of(gradients, mode), expected)]


def _unchanged(x: torch.Tensor, *_: Any, **__: Any) -> reference.ReferenceOutput:
    """Return x as an oracle's y that nothing has rounded."""
    z = x.double()
    return reference.ReferenceOutput(x, None, None, None, None, z, terms=torch.zeros_like(z))


class _Forward(NamedTuple):
    """A forward call of a gated or modulated norm, as autograd records it.

    Attributes:
        operands: its tensors.
        kept: what its family keeps of them, then mean and rstd.
        args: what the backward pass has to know besides.
    """

    operands: road.Operands
    kept: tuple[Any, ...]
    args: Any

    @property
    def due(self) -> tuple[bool, ...]:
        """Which operands have a gradient: every operand that is present."""
        return tuple([operand is not None for operand in self.operands])

    def named(self, gradients: Sequence[str]) -> tuple[str, ...]:
        """Return the names of gradients that are due, from the names of all in the order of the operands."""
        return tuple(compress(gradients, self.due))


def _forward(problem: Problem, device: torch.device) -> _Forward:
    mode, family = problem.mode, family_of(problem.mode)
    args = completed(family.functions[mode.norm], inputs(problem, device) | {"save_mv": True})
    calls = road.ROWS[family.name]
    operands = road.operands_of(calls, args)
    options = road.options_of(calls, mode.norm.value, args)
    outputs = road.launched(calls, operands, options)
    kept = (*calls.saved(operands, outputs.residual_out), outputs.mean, outputs.rstd)
    return _Forward(operands, kept, calls.args(options, dtypes_of(operands)))


def _prepare_gated(problem: Problem, device: torch.device) -> Run[GatedGradients]:
    mode, forward = problem.mode, _forward(problem, device)
    kept, dy = GatedSaved(*forward.kept), gradients_in(problem, device)["dy"]
    exact: dict[str, Any] = {"gating": mode.gating, "activation": mode.gate_activation, "eps": problem.eps}
    taken = gated.mode_of(forward.args, kept.x.dtype, mode.grouped)

    def validate(gradients: GatedGradients) -> tuple[Finding, ...]:
        expected = gating_reference.gradients(dy, *forward.operands, **exact)
        return tuple(compare_gradients(gradients, expected, forward.named(GatedGradients._fields)))

    return Run(
        names=lambda: names_of(dispatch.find(taken, problem.row_length), problem.rows, problem.n, device),
        call=lambda: GatedGradients(*gated.IN_PARTS.gradients(BackwardPass(kept, forward.args, dy, None, forward.due))),
        validate=validate,
        operands=(dy, *kept),
    )


def _prepare_modulated(problem: Problem, device: torch.device) -> Run[ModulatedGradients]:
    """Prepare the backward pass of a modulated norm; `Problem` has checked that kernels take the call."""
    forward, arriving = _forward(problem, device), gradients_in(problem, device)
    kept = ModulatedSaved(*forward.kept)
    dy, dresidual_out = arriving["dy"], arriving.get("dresidual_out")
    gates = kept.gate is not None
    taken = modulated.mode_of(problem.mode.norm, kept.x.dtype, dresidual_out is not None, gates)

    def call() -> ModulatedGradients:
        gradients = modulated.IN_PARTS.gradients(BackwardPass(kept, forward.args, dy, dresidual_out, forward.due))
        return ModulatedGradients(*gradients)

    def validate(gradients: ModulatedGradients) -> tuple[Finding, ...]:
        rows, others = kept.x, {name: each for name, each in kept._asdict().items() if name != "x"}
        expected = modulation_reference.gradients(dy, rows, **others, dresidual_out=dresidual_out)
        return tuple(compare_gradients(gradients, expected, forward.named(ModulatedGradients._fields)))

    return Run(
        names=lambda: names_of(dispatch.find(taken, problem.n), problem.rows, problem.n, device),
        call=call,
        validate=validate,
        # Only the shape of a shift is read.
        operands=(dy, dresidual_out, *(tensor for tensor in kept if tensor is not kept.shift)),
    )
