"""Several RMSNorms in one launch: `rms_norms`. Whatever one launch cannot serve is left to the function of one norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, signature
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from .. import settings
from ..calls import native
from ..calls.known import PlannedCall
from ..calls.launch import Held, recorded_of, run
from ..calls.record import records
from ..calls.road import FamilyCalls, Operands, Options
from ..calls.traced import is_dynamo_compiling
from ..errors import ConflictError
from ..kernels.gpu import target_of
from ..kernels.launcher import Launcher
from ..kernels.several import kernels_of, recipe_of
from ..selection import dispatch
from . import plain, quantised
from .plain_functions import add_rms_norm, rms_norm
from .public import quantised_rms_norm

# x, its weight, and the other arguments by name; the last ones may be missing.
Problem = Sequence[Any]

_MOST = 4
_NO_OPTIONS: Mapping[str, Any] = {}


def rms_norms(problems: Sequence[Problem]) -> list[Any]:
    """Compute up to four RMSNorms, each with a row length, weight, add and quantisation of its own, in one launch.

    Meant for few rows, where a launch takes longer than the norm: the latents of queries and of keys and values of MLA
    (DeepSeek-V2, 2024), for example. Each result is that of the function of one norm, `quantised_rms_norm` if an option
    is one that no other function has (fquant, out_dtype or group_size, say), or else `add_rms_norm` if there is a
    residual, or else `rms_norm`. Gradients are those of that function.

    All norms share the warps of a program, those of the norm that needs most, so that the last bits of another norm may
    differ from those of a call by itself. Under batch invariance they never do.

    The norms are computed one after another, each by its function, where one launch cannot serve them: where no kernel
    or an operator is called (see `layer_norm`; on a CPU, in traces, for DTensors); under batch invariance if warps
    differ; if a kernel walks rows otherwise (rows that start anywhere, or that several programs share); for tensors
    that are copied first; with out, residual_out, a y_scale to write to, dropout, dim or activation; on several GPUs;
    and under NORMFORGE_ON_MISS=error, because the kernel of a combination is generated on demand. A first call of a
    kind calls each function too, which checks all arguments.

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
    _check(problems)
    if is_dynamo_compiling() or len(problems) == 1:
        return [_alone(*each) for each in problems]
    known, alone = _found(problems), None
    if known is None:
        # The calls are known from now on. Their results are left, so that every call of a kind has the same bits.
        alone = [_alone(*each) for each in problems]
        known = _found(problems)
    launcher = None if known is None else _launcher_of(known)
    if known is None or not launcher:
        return alone or [_alone(*each) for each in problems]
    return _launched(known, launcher)


def _check(problems: Sequence[Problem]) -> None:
    if not isinstance(problems, (list, tuple)) or not 1 <= len(problems) <= _MOST:
        passed = f"has {len(problems)} items" if isinstance(problems, (list, tuple)) else f"is {problems!r}"
        raise ConflictError(f"problems {passed}; it takes a list of 1 to {_MOST} tuples (x, weight, options)")
    for at, each in enumerate(problems):
        if not _is_problem(each):
            raise ConflictError(
                f"problems[{at}] is a {type(each).__name__} that is no (x, weight, options); it takes x, its weight or "
                "None, and a dict of the other arguments by name, of which the last ones may be missing"
            )


def _is_problem(given: Any) -> bool:
    is_sized = isinstance(given, (list, tuple)) and 1 <= len(given) <= 3
    return is_sized and (len(given) < 3 or isinstance(given[2], dict))


class _Function(NamedTuple):
    """A function of one norm whose calls one launch can serve.

    Attributes:
        calls: the row of its family.
        takes: the options that such calls may have.
        arguments: the default of each argument by name, None for what is no option.
        operands: picks a call's tensors from the arguments.
        options: picks what else a call is looked up by.
    """

    calls: FamilyCalls
    takes: frozenset[str]
    arguments: dict[str, Any]
    operands: Callable[[Any], Operands]
    options: Callable[[Any], Options]


def _function(function: Callable[..., Any], calls: FamilyCalls, options: tuple[str, ...], *also: str) -> _Function:
    names = (*calls.inputs, *options, *also)
    defaults = {name: each.default for name, each in signature(function).parameters.items() if name in names}
    arguments = dict.fromkeys(names) | {name: each for name, each in defaults.items() if each is not Parameter.empty}
    takes = frozenset(defaults) - {"x", "weight"}
    return _Function(calls, takes, arguments, itemgetter(*calls.inputs), itemgetter(*options))


# The look-up finds out by itself whether a residual is added.
_PLAIN = _function(add_rms_norm, plain.CALLS, ("eps", "weight_offset", "out_dtype", "cast"))
_QUANTISED = _function(quantised_rms_norm, quantised.CALLS, quantised.CALLS.options, "y_scale")
_QUANTISING = frozenset(signature(quantised_rms_norm).parameters) - frozenset(signature(add_rms_norm).parameters)


def _quantises(options: Mapping[str, Any]) -> bool:
    return any(name in _QUANTISING for name in options)


def _alone(x: Any, weight: Any = None, options: Mapping[str, Any] = _NO_OPTIONS) -> Any:
    """Compute one problem by its function."""
    if _quantises(options):
        return quantised_rms_norm(x, weight, **options)
    if "residual" in options:
        return add_rms_norm(x, weight=weight, **options)
    return rms_norm(x, x.shape[-1:] if hasattr(x, "shape") else (), weight, **options)


class _Known(NamedTuple):
    """A problem that is a known call.

    Attributes:
        planned: what launches take.
        operands: its tensors.
        options: what else it was looked up by.
        quantises: whether it is a call of `quantised_rms_norm`.
        is_recorded: whether autograd records it.
    """

    planned: PlannedCall
    operands: Operands
    options: Options
    quantises: bool
    is_recorded: bool


def _found(problems: Sequence[Problem]) -> list[_Known] | None:
    """Return the problems if all of them are known calls that one launch could serve."""
    known = []
    for problem in problems:
        one = _find(*problem)
        if one is None:
            return None
        known.append(one)
    return known


def _find(x: Any, weight: Any = None, options: Mapping[str, Any] = _NO_OPTIONS) -> _Known | None:
    quantises = _quantises(options)
    function = _QUANTISED if quantises else _PLAIN
    if not function.takes.issuperset(options):
        return None
    arguments = {**function.arguments, **options, "x": x, "weight": weight}
    operands, settled = function.operands(arguments), ("rms", *function.options(arguments))
    if quantises:
        operands, settled, outs = quantised.arranged(operands, settled, (None, None, arguments["y_scale"]))
        if outs[-1] is not None or records(operands):
            return None
    _, is_recorded, planned = getattr(native.calls, function.calls.name).find(operands, settled)
    return None if planned is None else _Known(planned, operands, settled, quantises, is_recorded)


def _launcher_of(known: Sequence[_Known]) -> Launcher | bool:
    """Return the launcher of the kernel that serves calls like these; False if none does."""
    planned = [each.planned for each in known]
    key = (rms_norms, *[plan.prepared(m).launchers[0] for plan, _, _, _, m, _ in planned])
    launcher: Launcher | bool | None = dispatch.plans.get(key)
    if launcher is None:
        launcher = _join(planned)
        dispatch.remember(dispatch.plans, key, launcher)
    return launcher


def _join(planned: Sequence[PlannedCall]) -> Launcher | bool:
    plans, ms = [plan for plan, *_ in planned], [m for *_, m, _ in planned]
    first, *others = [plan.kind(m) for plan, m in zip(plans, ms, strict=True)]
    recipes = [plan.prepared(m).assembly.walkers[0] for plan, m in zip(plans, ms, strict=True)]
    kernels = kernels_of([plan.mode for plan in plans], recipes, invariant=plans[0].is_invariant)
    device, *elsewhere = {x.device for _, _, (x, *_), *_ in planned}
    if kernels is None or elsewhere or not settings.generates():
        return False
    from ..selection import on_demand

    dispatch.tell(lambda: replace(first, beside=tuple(others)))
    return Launcher(on_demand.several(kernels), recipe_of(recipes), target_of(device), device)


def _launched(known: Sequence[_Known], launcher: Launcher) -> list[Any]:
    """Allocate all results, launch once, and return what each function would."""
    held: list[tuple[Any, ...]] = []
    outputs = [_hold(each, held) for each in known]
    programs = [plan.at(shape).layout.steps[0][1][0] for (plan, _, _, shape, *_), *_ in known]
    grid = max(programs), len(programs), 1
    launch = launcher.launch or launcher.launch_tensors
    launch(grid, (*chain(*held), *programs))
    return [_returned(each, output) for each, output in zip(known, outputs, strict=True)]


def _hold(known: _Known, held: Held) -> Any:
    if known.quantises:
        return quantised.launch(known.planned, known.options, (None, None, None), held)
    return recorded_of(known.planned, held) if known.is_recorded else run(known.planned, held=held)


def _returned(known: _Known, output: Any) -> Any:
    if known.quantises:
        return output
    if known.is_recorded:
        return plain.record_known(plain.CALLS, known.operands, known.options, output)
    y, total, *_ = output
    return y if total is None else (y, total)
