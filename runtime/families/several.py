"""Several RMSNorms in one launch: `rms_norms`. Whatever one launch cannot serve is left to the function of one norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any, cast

from ..calls import native, road
from ..calls.launch import recorded_of, run
from ..calls.plan import PlannedCall
from ..calls.record import records
from ..calls.road import FamilyCalls, Outs
from ..calls.traced import is_dynamo_compiling
from ..kernels.assembly import check_problems, join
from ..kernels.gpu import target_of
from ..kernels.launcher import Launcher
from ..selection import dispatch
from . import plain, quantised
from .plain_functions import add_rms_norm, rms_norm
from .public import quantised_rms_norm

_NO_OPTIONS: Mapping[str, Any] = {}


def rms_norms(problems: Sequence[Sequence[Any]]) -> list[Any]:
    """Compute up to four RMSNorms, each with a row length, weight, residual and quantisation of its own, in one launch.

    Meant for few rows, where a launch takes longer than a norm: the latents of queries and of keys and values of MLA
    (DeepSeek-V2, 2024), for example. Each result is that of the function of one norm: `quantised_rms_norm` for an
    option that only this function has (fquant, out_dtype or group_size, say), else `add_rms_norm` for a residual, else
    `rms_norm`. So are gradients, each by kernels of its own.

    All norms share the warps of a program, those of the norm with most, so that other norms may differ in the last bits
    from calls by themselves. Under batch invariance they never do.

    The norms are computed one after another by these functions where one launch cannot serve them: where no kernel
    runs, or an operator is called (as described in `layer_norm`: CPUs, traces, DTensors); under batch invariance if
    warps differ; for rows that start anywhere or that several programs share; for tensors that are copied first; with
    out, residual_out, a y_scale to write to, or dropout; on several GPUs; and under NORMFORGE_ON_MISS=error, because
    the kernel of a combination is generated on demand. The first call of a kind calls these functions too, which check
    the arguments.

    Args:
        problems: one to four tuples (x, weight, options), in which options, or both of the last, may be missing. x is
            (..., N) and weight (N,) or None. options are the other arguments of the function by name: eps,
            weight_offset, residual, cast, fquant, group_size and so on, and in rms_norms never normalized_shape.

    Returns:
        The result of each function, in order: y, or (y, residual_out), or a `QuantisedOutput`.

    Raises:
        ConflictError: there are no problems or more than four, or one is no such tuple.
        TypeError: an option is none that the function takes.
        NormforgeError: one of the errors that `rms_norm`, `add_rms_norm` or `quantised_rms_norm` lists.
    """
    check_problems(problems)
    if is_dynamo_compiling() or len(problems) == 1:
        return [_alone(*each) for each in problems]
    alone, known = None, found(problems)
    if known is None:
        # Known from now on. What is computed here is not returned, so that every call of a kind has the same bits.
        alone = [_alone(*each) for each in problems]
        known = found(problems)
    launcher = None if known is None else launcher_of([planned for planned, _, _ in known])
    if known is None or launcher is None:
        return alone or [_alone(*each) for each in problems]
    return _launched(known, launcher)


def _defaults(function: Callable[..., Any], calls: FamilyCalls, **own: None) -> dict[str, Any]:
    """Return the options of a function that calls in one launch may have, with their defaults."""
    names = {*calls.inputs, *calls.options} - {"x", "weight"}
    return {name: each.default for name, each in signature(function).parameters.items() if name in names} | own


_PLAIN = plain.CALLS, _defaults(add_rms_norm, plain.CALLS, residual=None, out_dtype=None)
_QUANTISED = quantised.CALLS, _defaults(quantised_rms_norm, quantised.CALLS, y_scale=None, save_amax=None)
_QUANTISING = frozenset(signature(quantised_rms_norm).parameters) - frozenset(signature(add_rms_norm).parameters)


def _quantises(options: Mapping[str, Any]) -> bool:
    return not _QUANTISING.isdisjoint(options)


def _alone(x: Any, weight: Any = None, options: Mapping[str, Any] = _NO_OPTIONS) -> Any:
    """Compute one problem by its function."""
    if _quantises(options):
        return quantised_rms_norm(x, weight, **options)
    if options.get("residual") is not None:
        return add_rms_norm(x, weight=weight, **options)
    others = {name: each for name, each in options.items() if name != "residual"}
    return rms_norm(x, x.shape[-1:] if hasattr(x, "shape") else (), weight, **others)


# A known call as launches take it, the function that makes its outputs and passes on the values of its launch, and the
# function from its outputs to its result.
_Known = tuple[PlannedCall, Callable[..., Any], Callable[[Any], Any]]


def found(problems: Sequence[Sequence[Any]]) -> list[_Known] | None:
    """Return the problems, if all of them are known calls that one launch could serve."""
    known = [_find(*each) for each in problems]
    return None if None in known else cast("list[_Known]", known)


def _find(x: Any, weight: Any = None, options: Mapping[str, Any] = _NO_OPTIONS) -> _Known | None:
    quantises = _quantises(options)
    calls, defaults = _QUANTISED if quantises else _PLAIN
    if not defaults.keys() >= options.keys():
        return None
    arguments = {**defaults, **options, "x": x, "weight": weight}
    operands, settled = road.operands_of(calls, arguments), road.options_of(calls, "rms", arguments)
    outs: Outs = (None, None, arguments.get("y_scale"))
    if quantises:
        operands, settled, outs = quantised.arranged(operands, settled, outs)
        if outs[-1] is not None or records(operands):
            return None
    _, is_recorded, planned = getattr(native.calls, calls.name).find(operands, settled[: calls.looked_up[1]])
    if planned is None:
        return None
    if is_recorded:
        return planned, partial(recorded_of, planned), partial(plain.record_known, calls, operands, settled)
    if quantises:
        return planned, partial(quantised.launch, planned, settled, outs), quantised.returned
    return planned, partial(run, planned), lambda outputs: outputs[0] if outputs[1] is None else tuple(outputs[:2])


def launcher_of(planned: Sequence[PlannedCall]) -> Launcher | None:
    """Return the launcher of the kernel that serves such calls together; None if none does."""
    plans, key = dispatch.plans, ("several", *[plan.prepared(m).launchers[0] for plan, _, _, _, m, _ in planned])
    joined = plans.get(key)
    if joined is None:
        joined = (_join(planned),)
        dispatch.remember(plans, key, joined)
    return cast("Launcher | None", joined[0])


def _join(planned: Sequence[PlannedCall]) -> Launcher | None:
    pairs = [(plan, m) for plan, _, _, _, m, _ in planned]
    walkers = [plan.prepared(m).assembly.walkers for plan, m in pairs]
    device, *elsewhere = {each.device for _, _, (each, *_), *_ in planned if each is not None}
    names, is_invariant = [plan.mode.name for plan, _ in pairs], planned[0][0].is_invariant
    # A call of several kernels has launches of its own.
    apart = elsewhere or any(len(each) > 1 for each in walkers)
    shared = None if apart else join(names, [first for first, *_ in walkers], invariant=is_invariant)
    if shared is None:
        return None
    kind, *beside = [plan.facts.kind(m) for plan, m in pairs]
    dispatch.tell(lambda: replace(kind, beside=tuple(beside)))
    kernels, recipe = shared
    return Launcher(dispatch.several(kernels).load(), recipe, target_of(device), device)


def _launched(known: Sequence[_Known], launcher: Launcher) -> list[Any]:
    """Allocate all results, launch once, and return what each function would."""
    held: list[tuple[Any, ...]] = []
    outputs = [launch(held=held) for _, launch, _ in known]
    programs = [plan.at(shape).layout.steps[0][1][0] for (plan, _, _, shape, *_), _, _ in known]
    launch = launcher.launch or launcher.launch_tensors
    launch((max(programs), len(programs), 1), (*chain(*held), *programs))
    return [returned(each) for (_, _, returned), each in zip(known, outputs, strict=True)]
