"""A run of one problem: its kernel on random tensors, held against the fp64 reference and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from .. import gating_reference, modulation_reference, quantisation_reference, reference
from ..calls import gated_backward, gated_instead, neighbours, straight
from ..calls.check import check
from ..calls.functions import completed
from ..calls.neighbour_rows import CALLS
from ..calls.outputs import GatedGradients, LayerNormOutput, NormGradients, QuantisedOutput
from ..calls.which import which
from ..codegen.families import Kind
from ..codegen.parameters import BACKWARD, QUANTISED, family_of
from ..codegen.values import Norm, Pipeline
from ..kernels.gpu import architecture
from ..selection import dispatch
from ..selection.table import Entry
from .compare import Finding, compare, compare_gradients, compare_quantised, numbers_of, worst_of
from .machine import Machine
from .problem import Problem, gradients_in, inputs, poisoned_outputs
from .timing import median_ms

Outputs = TypeVar("Outputs", bound="tuple[Any, ...]")


@dataclass(frozen=True)
class Run(Generic[Outputs]):
    """A problem with its tensors, to be called again and again.

    Attributes:
        entry: the instance that serves it.
        call: computes the outputs.
        validate: how far outputs are from the fp64 reference.
        operands: what a call reads, tensors and others.
    """

    entry: Callable[[], Entry]
    call: Callable[[], Outputs]
    validate: Callable[[Outputs], tuple[Finding, ...]]
    operands: tuple[object, ...]

    def moved(self, outputs: Outputs) -> int:
        """Bytes a call moves: every tensor read or written, once."""
        return _bytes(self.operands) + _bytes(outputs)


class Result(NamedTuple):
    """What a run found out.

    Attributes:
        instance: the table entry that served it.
        kernel: the symbol of the kernel that it took.
        findings: how far each output is from the reference; empty if it was not validated.
        ms: the median time on a GPU, or one run's in the interpreter.
        gb_per_s: bytes moved over that time; None in the interpreter.
    """

    instance: str
    kernel: str
    findings: tuple[Finding, ...]
    ms: float
    gb_per_s: float | None


_Forward = Callable[..., LayerNormOutput]
_Oracle = Callable[..., reference.ReferenceOutput]

_FORWARD: dict[Norm, tuple[_Forward, _Oracle]] = {
    Norm.LAYER: (straight.layernorm2d_fwd, reference.layernorm2d_fwd),
    Norm.RMS: (straight.rmsnorm2d_fwd, reference.rmsnorm2d_fwd),
}

# By the family's word.
_BESIDE = {"modulated": modulation_reference, "gated": gating_reference, "quantised": quantisation_reference}

# Elements the reference works on at once: in fp64, with its temporaries, a few gigabytes.
REFERENCE_ELEMENTS = 2**26

# The arguments that have a row for each row of x, or for each sample; every other tensor is one row long and shared.
_ROW_ARGUMENTS = ("x", "residual", "x_scale", "scale", "shift", "gate")


def solve(problem: Problem, machine: Machine, *, validate: bool, warmup: int, repeat: int) -> Result:
    """Run a problem's kernel on random tensors, hold it against the fp64 reference, and time it.

    Raises:
        NormforgeError: whatever the call raises; an axis combination that no kernel serves, say.
    """
    run = prepare(problem, machine.device)

    def pipeline() -> Pipeline:
        return run.entry().tile(problem.rows, architecture(machine.device)).pipeline

    return measured(run, pipeline, machine, validate=validate, warmup=warmup, repeat=repeat)


def measured(
    run: Run[Any],
    pipeline: Callable[[], Pipeline],
    machine: Machine,
    *,
    validate: bool,
    warmup: int,
    repeat: int,
) -> Result:
    """Call a run, validate it, and time it; the pipeline is asked for once it has been called."""
    begin = time.perf_counter()
    outputs = run.call()
    interpreted_ms = (time.perf_counter() - begin) * 1e3
    findings = run.validate(outputs) if validate else ()
    ms = interpreted_ms if machine.interpreted else median_ms(run.call, warmup=warmup, repeat=repeat)
    entry = run.entry()
    rate = None if machine.interpreted else run.moved(outputs) / ms / 1e6
    return Result(entry.name, entry.kernel(pipeline()), findings, ms, rate)


def prepare(problem: Problem, device: torch.device) -> Run[Any]:
    """Make a problem's tensors, so that it can be run on a device.

    Raises:
        NormforgeError: no kernel serves the problem.
    """
    if problem.backward and problem.mode.gating.gates:
        return _prepare_gated_backward(problem, device)
    if family_of(problem.mode).neighbour:
        return _prepare_beside(problem, device)
    return _prepare_backward(problem, device) if problem.backward else _prepare_forward(problem, device)


def _prepare_forward(problem: Problem, device: torch.device) -> Run[LayerNormOutput]:
    forward, oracle = _FORWARD[problem.mode.norm]
    arguments = inputs(problem, device)
    instance = which(**arguments, norm=problem.mode.norm)
    outputs = poisoned_outputs(problem, device)
    return Run(
        entry=lambda: next(entry for entry in dispatch.instances() if entry.name == instance),
        call=lambda: forward(**arguments, **outputs),
        validate=lambda result: _validate(problem, oracle, arguments, result),
        operands=tuple(arguments.values()),
    )


def _prepare_beside(problem: Problem, device: torch.device) -> Run[Any]:
    mode, arguments = problem.mode, inputs(problem, device)
    family = family_of(mode)
    function = family.functions[mode.norm]
    oracle: Callable[..., Any] = getattr(_BESIDE[family.neighbour], function)
    validate: Callable[..., tuple[Finding, ...]] = _validate_quantised if family is QUANTISED else _validate
    given, calls = completed(function, arguments), CALLS[family.neighbour]
    operands = neighbours.operands_of(calls, given)
    options = neighbours.options_of(calls, mode.norm.value, given)
    return Run(
        entry=lambda: dispatch.find(mode, problem.row_length),
        call=lambda: neighbours.launched(calls, operands, options),
        validate=lambda result: validate(problem, oracle, arguments, result),
        operands=tuple(arguments.values()),
    )


def _prepare_gated_backward(problem: Problem, device: torch.device) -> Run[GatedGradients]:
    """Run a problem forward for its statistics, and make the gradients that autograd would compute ready."""
    mode, arguments = problem.mode, inputs(problem, device)
    given = completed(family_of(mode).functions[mode.norm], arguments | {"save_mv": True})
    calls = CALLS["gated"]
    operands = neighbours.operands_of(calls, given)
    options = neighbours.options_of(calls, mode.norm.value, given)
    forward = neighbours.launched(calls, operands, options)
    assert forward.rstd is not None
    x, gate, weight, bias = operands
    kept = gated_instead.Kept(x, gate, weight, bias, forward.mean, forward.rstd)
    told = calls.told(options, neighbours.dtypes_of(operands))
    dy, due = gradients_in(problem, device)["dy"], [operand is not None for operand in operands]
    exact: dict[str, Any] = {"gating": mode.gating, "activation": mode.gate_activation, "eps": problem.eps}
    taken = gated_backward.mode_of(told, operands[0].dtype, mode.grouped)

    def validate(found: GatedGradients) -> tuple[Finding, ...]:
        return tuple(compare_gradients(found, gating_reference.gradients(dy, x, gate, weight, bias, **exact)))

    return Run(
        entry=lambda: dispatch.find(taken, problem.row_length),
        call=lambda: GatedGradients(*gated_backward.gradients(kept, told, dy, due)),
        validate=validate,
        operands=(dy, *operands, forward.mean, forward.rstd),
    )


def _validate(
    problem: Problem, oracle: _Oracle, arguments: dict[str, Any], result: LayerNormOutput
) -> tuple[Finding, ...]:
    """The worst finding of each output, over slices of rows, tokens or samples that the reference holds in memory."""
    found: list[Finding] = []
    for rows in _row_slices(problem):
        sliced = arguments | {name: arguments[name][rows] for name in _ROW_ARGUMENTS if name in arguments}
        if problem.mode.dropout:
            # The mask is one of all rows.
            sliced["first_row"] = rows.start * problem.heads
        outputs = result._replace(
            **{name: value[rows] for name, value in result._asdict().items() if value is not None}
        )
        found += compare(outputs, oracle(**sliced), problem.mode.rounding)
    return worst_of(found)


def _validate_quantised(
    problem: Problem,
    oracle: Callable[..., quantisation_reference.ReferenceQuantised],
    arguments: dict[str, Any],
    result: QuantisedOutput,
) -> tuple[Finding, ...]:
    """The same of quantised norms, whose scales are read as they are stored."""
    found: list[Finding] = []
    scale, leading = result.y_scale, arguments["x"].shape[:-1]
    if scale is not None:
        size = problem.mode.group_size.code or problem.n
        scale = numbers_of(
            scale, problem.mode, torch.Size((*leading, -(-problem.n // size))), arguments.get("global_scale")
        )
    for rows in _row_slices(problem):
        sliced = arguments | {name: arguments[name][rows] for name in _ROW_ARGUMENTS if name in arguments}
        parts = {
            name: value[rows] for name, value in result._replace(y_scale=None)._asdict().items() if value is not None
        }
        outputs = result._replace(**parts)
        found += compare_quantised(outputs, None if scale is None else scale[rows], oracle(**sliced))
    return worst_of(found)


def _row_slices(problem: Problem) -> Iterator[slice]:
    together, groups = problem.heads, problem.tokens
    if problem.samples:
        together, groups = problem.m // problem.samples, problem.samples
    some = max(1, REFERENCE_ELEMENTS // (together * problem.n))
    for first in range(0, groups, some):
        yield slice(first, first + some)


def _prepare_backward(problem: Problem, device: torch.device) -> Run[NormGradients]:
    """Run a problem forward for its statistics, and make every gradient it has ready to be computed.

    The gradients of a fused add are those of the stored sum, which is what the backward kernel reads. That sum holds
    x_bias already, so that its gradient is dx summed over rows, before dx is rounded, as autograd computes it.

    Raises:
        NormforgeError: whatever the forward call raises.
    """
    arguments = inputs(problem, device)
    mode = problem.mode
    is_layer = mode.norm is Norm.LAYER
    forward = (straight.layernorm2d_fwd if is_layer else straight.rmsnorm2d_fwd)(**arguments | {"save_mv": True})
    operands: dict[str, Any] = {"x": arguments["x"], "weight": arguments["weight"], "rstd": forward.rstd}
    if is_layer:
        operands["mean"] = forward.mean
    if mode.fadd.stores:
        operands["x"] = forward.residual_out
    elif mode.x_bias:
        operands["x_bias"] = arguments["x_bias"]
    operands |= gradients_in(problem, device)
    operands |= {row.name: getattr(mode, row.axis) for row in BACKWARD.parameters if row.kind is Kind.WORD}
    wants = ["dx", "dweight", *(["dbias"] if is_layer else []), *(["dx_bias"] if "x_bias" in operands else [])]
    if mode.dropout:
        operands |= {name: arguments[name] for name in ("dropout_p", "dropout_rng")}
        wants.append("ddropped")
    run = straight.layernorm2d_bwd if is_layer else straight.rmsnorm2d_bwd

    def call() -> NormGradients:
        if not (mode.fadd.stores and mode.x_bias):
            return run(**operands, wants=wants)
        gradients = run(**operands, wants=wants, dx_dtype=torch.float32, dropped_dtype=torch.float32)
        dtype = arguments["x_bias"].dtype
        wide = {
            name: rows for name, rows in (("dx", gradients.dx), ("ddropped", gradients.ddropped)) if rows is not None
        }
        summed = wide.get("ddropped", wide["dx"]).flatten(0, -2).sum(0)
        return gradients._replace(**{name: rows.to(dtype) for name, rows in wide.items()}, dx_bias=summed.to(dtype))

    oracle = reference.layernorm2d_bwd if is_layer else reference.rmsnorm2d_bwd

    def validate(gradients: NormGradients) -> tuple[Finding, ...]:
        return tuple(compare_gradients(gradients, oracle(**operands)))

    taken = check(BACKWARD.functions[mode.norm], operands).mode
    return Run(
        entry=lambda: dispatch.find(taken, problem.n),
        call=call,
        validate=validate,
        operands=tuple(operands.values()),
    )


def _bytes(values: Iterable[object]) -> int:
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
