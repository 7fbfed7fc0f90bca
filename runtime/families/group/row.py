"""Calls of GroupNorm, and of norms over channels: known, handed on, checked, laid out, launched and recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import lru_cache
from operator import index, itemgetter
from typing import Any

import torch
from torch.nn import functional

from ...call_kinds import GROUP_SIZES
from ...calls import native
from ...calls.backend import backend, is_served, left_to_torch
from ...calls.check import Call, check_device, check_dtype, check_number, check_tensor
from ...calls.launch import Ready, Recorded, recorded_of, run, run_recorded
from ...calls.native import is_last
from ...calls.plan import LAYOUTS, Key, Plan, PlannedCall, Sized, addresses_of, make_of, plan_of, remember
from ...calls.record import (
    BackwardPass,
    Gradients,
    Launched,
    Recording,
    arrived_in_memory,
    record,
    record_at_once,
    records,
)
from ...calls.row_gradients import call_of, looked_up_again
from ...calls.traced import becomes_operator, intercepted, is_dynamo_compiling, operator, result_dtype, unrecorded
from ...codegen.groups import Activation, GroupMode, Span
from ...codegen.parameters import GROUP
from ...codegen.values import Cast, Direction
from ...dtypes import DTYPES, FLOATS, word
from ...errors import ConflictError, ShapeError
from ...kernels.gpu import ALIGNMENT, require_device
from ...selection import dispatch
from ...selection.invariance import is_on
from ...upstream.torch_internals import eager_only, is_sharded
from .. import eager
from ..operands import DEFAULT_EPS, GroupOperands, GroupOptions, Operands, Options
from ..plain_calls import by_parts, checked, handed_on, is_handed_on
from ..plain_calls import normalise as normalise_rows

# The name of the public function and of the operator.
(NAME,) = GROUP.functions.values()

_Vector = torch.Tensor | None
_Vectors = Mapping[str, _Vector]
# Channels, groups of a sample, and positions of a channel.
Sizes = tuple[int, int, int]
# The norm's word, and the options of a call as callers passed them, by which calls are known; the last is None, because
# statistics are saved if a gradient is due.
KeyArgs = tuple[Any, ...]

_WORDS = tuple(activation.value for activation in Activation)


def applied(activation: str | Activation | None) -> str:
    """Return the word of an activation, which None is one of."""
    # torch 2.11's TorchDynamo can make no enum of a word.
    if activation is None:
        return _WORDS[0]
    if isinstance(activation, str) and activation in _WORDS:
        return activation
    return word(Activation, "activation", activation).value


def are_channels_last(x: torch.Tensor) -> bool | None:
    """Return True if channels are innermost in memory, False if positions are, and None for any other layout."""
    if x.dim() == 2:
        return True if x.is_contiguous() else None
    if x.is_contiguous():
        return False
    return True if x.movedim(1, -1).is_contiguous() else None


def laid_out(x: torch.Tensor) -> torch.Tensor:
    """Return x without gaps, channels or positions innermost: x itself, or a copy in the nearer layout."""
    if are_channels_last(x) is not None:
        return x
    return _with_channels(x, last=x.dim() > 2 and x.stride(1) == 1 and x.shape[1] > 1)


def _with_channels(x: torch.Tensor, *, last: bool | None) -> torch.Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last and x.dim() > 2 else x.contiguous()


def _aligned(tensor: _Vector) -> _Vector:
    """Return a copy of a misaligned tensor under batch invariance, where all samples share one kernel."""
    return tensor.clone() if tensor is not None and is_on() and tensor.data_ptr() % ALIGNMENT else tensor


def statistics_shape(x: torch.Tensor, num_groups: int) -> tuple[int, int, int]:
    """Return the shape of the statistics of x: of groups, or of positions if these are normalised by themselves."""
    return 2, x.shape[0], num_groups if num_groups > 0 else math.prod(x.shape[2:])


def _readable(x: torch.Tensor, *vectors: _Vector) -> Any:
    """Return operands that kernels can read: copies of those that have gaps, or that negate their memory."""
    whole = [None if vector is None else vector.resolve_neg().contiguous() for vector in vectors]
    return tuple(map(_aligned, (laid_out(x).resolve_neg(), *whole)))


@eager_only
def launched(
    x: torch.Tensor, weight: _Vector, bias: _Vector, options: GroupOptions, *, saves: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a checked call of a tensor that kernels can walk: return y, and if it `saves` them mean and rstd per group.

    The statistics are one tensor, (2, samples, groups), fp32.
    """
    require_device(x)
    if not x.numel():
        statistics = x.new_zeros(statistics_shape(x, options.num_groups), dtype=torch.float32) if saves else None
        return torch.empty_like(x, dtype=options.out_dtype or x.dtype), statistics
    y, *_, statistics = run_recorded(_prepared(_readable(x, weight, bias), options, saves, None))
    return y, statistics


def call_in_memory(mode: GroupMode, sizes: Sizes, tensors: _Vectors, dtypes: Mapping[str, torch.dtype]) -> Call:
    """Return the call of a mode, whose operands were checked.

    Args:
        mode: the mode.
        sizes: the sizes of x.
        tensors: the tensors that kernels read, by name.
        dtypes: the dtypes of the results that are due, by name.
    """
    args = {**tensors, "sizes": dict(zip(GROUP_SIZES, sizes, strict=True))}
    if mode.is_backward and not mode.activation.is_applied:
        # Gradients of what is not activated do not depend on bias.
        args["bias"] = None
    return call_of(mode, 0, sizes[0] // sizes[1] * sizes[2], args, dtypes)


def slots_of(call: Call, misaligned: Collection[str]) -> set[str]:
    """Return the slots of the tensors of a call that are misaligned: rstd is, because it starts behind all means."""
    return {"rstd_ptr", *[f"{name}_ptr" for name in misaligned if call.args.get(name) is not None]}


def _plan(direction: Direction, tensors: _Vectors, options: GroupOptions, dtypes: Mapping[str, torch.dtype]) -> Plan:
    x = tensors["x"]
    assert x is not None
    samples, channels = x.shape[:2]
    span, activation = Span.of(options.num_groups), Activation(options.activation)
    mode = GroupMode(DTYPES[x.dtype], direction, activation, bool(are_channels_last(x)), span)
    sizes = channels, max(options.num_groups, 1), x.numel() // (samples * channels)
    misaligned = [name for name, tensor in tensors.items() if tensor is not None and tensor.data_ptr() % ALIGNMENT]
    call = call_in_memory(mode, sizes, tensors, dtypes)
    return plan_of(call, slots_of(call, misaligned))


# From what arrived for a backward pass, the means and rstd to what launches bring.
_INPUTS = itemgetter(0, 2, 3, 4, 6, 7)


def _sized_by(plan: Plan, x: torch.Tensor, num_groups: int) -> Callable[[torch.Size], Sized | None]:
    """Return how calls of a plan are launched, from the shapes of tensors like x; None for no rows.

    The number of samples is no part of a plan, and y and dx have the strides of x.
    """
    strides, dtype, groups = x.stride(), plan.dtypes[0], plan.sizes["groups"]
    *_, rows = statistics_shape(x, num_groups)
    sums = [make_of((plan.sizes["channels"],), each) for each in plan.sum_dtypes]

    @lru_cache(LAYOUTS)
    def at(shape: torch.Size) -> Sized | None:
        m = shape[0] * groups
        if m == 0:
            return None
        # One tensor holds the means of all groups, and rstd right behind them.
        to_rstd = shape[0] * rows * torch.float32.itemsize if plan.saves_mean else 0
        layout = plan.layout(m)._replace(to_rstd=to_rstd)
        images: Any = (tuple(shape), strides, dtype)
        if plan.mode.is_backward:
            # Kernels take an eps and do not read it.
            return Sized(layout, (0.0,), (images, *sums))
        of_both = make_of((2, shape[0], rows), torch.float32) if plan.saves_mean else None
        return Sized(layout, (), (images, None, None), (images, None, of_both))

    return at


def _prepared(operands: GroupOperands, options: GroupOptions, saves: bool, key: Key | None) -> PlannedCall:
    """Plan a call of operands that kernels can read, make its kind known by a key, and return what launches take."""
    x, weight, bias = operands
    plans, addresses = dispatch.plans, tuple(addresses_of(operands))
    dtypes = {"y": options.out_dtype or x.dtype, **dict.fromkeys(("mean", "rstd") if saves else (), torch.float32)}
    shared = _plan(Direction.FORWARD, {"x": x, "weight": weight, "bias": bias}, options, dtypes)
    plan = copy(shared)
    plan.at = _sized_by(shared, x, options.num_groups)
    remember(plans, key, operands, (1, 0, 0), addresses, plan)
    return plan, addresses, operands, x.shape, x.shape[0] * plan.sizes["groups"], (options.eps,)


@eager_only
def launched_backward(call: BackwardPass) -> Gradients:
    """Compute the gradients that are due by kernels; dy is copied unless its layout is x's.

    The statistics of each group are one tensor, (2, samples, groups), fp32.
    """
    gradient: Any = call.dy
    (x, weight, bias, statistics), (options, *_), due = call.saved, call.args, call.due
    require_device(x)
    plans = dispatch.plans
    x, weight, bias = _readable(x, weight, bias)
    dy = _aligned(_with_channels(gradient, last=are_channels_last(x)).resolve_neg())
    learnt, known = looked_up_again("group_gradients", call._replace(dy=dy))
    if known is not None:
        return known
    gradients = {"dx": x, "dweight": weight, "dbias": bias}
    pairs = zip(gradients.items(), due, strict=True)
    wanted = {name: own for (name, own), is_due in pairs if is_due and own is not None}
    if not x.numel():
        return [torch.zeros_like(wanted[name]) if name in wanted else None for name in gradients]
    # A hook of saved tensors may bring the statistics back at any address.
    tensors = {"dy": dy, "x": x, "weight": weight, "bias": bias, "mean": statistics}
    dtypes = {"dx": x.dtype, **{name: own.dtype for name, own in wanted.items()}}
    # Kernels write dx whether a call wants dx or not.
    order = itemgetter(0 if due[0] else 3, 1, 2)
    plan = _plan(Direction.BACKWARD, tensors, options, dtypes)
    ready = Ready(plan, _INPUTS, order, _sized_by(plan, x, options.num_groups))
    launched = (dy, None, x, weight, bias, statistics)
    addresses = addresses_of(launched)
    outputs = ready.run(launched, addresses)
    assert outputs is not None
    if learnt is not None:
        key, arrived = learnt
        # No call is known whose kernels read copies.
        if addresses == addresses_of(arrived):
            remember(plans, key, arrived, (1, 0, 1, 0, 0, 2), tuple(addresses), ready)
    return outputs


def normalise_checked(operands: GroupOperands, options: GroupOptions, key_args: KeyArgs) -> torch.Tensor:
    """Run a checked call by kernels, recorded where a gradient is due, and known from then on by `key_args`.

    Where a dispatch mode sees operators, the call is one operator that saves the same tensors.
    """
    if becomes_operator(*operands):
        x, *vectors = operands
        outputs: list[torch.Tensor] = operator(NAME)(laid_out(x), *vectors, *options, records(operands))
        return outputs[0]
    whole = _readable(*operands)
    saves, recorded = records(whole), None
    if not intercepted(*whole):
        native.start()
        # Copies may be like the tensors of a call before.
        key, _, planned = native.calls.group.find(whole, key_args)
        planned = planned or _prepared(whole, options, saves, key)
        if not saves:
            return run(planned)[0]
        recorded = recorded_of(planned)
        # The options that backward calls are known by, as `_record_known` has them.
        options = options._replace(out_dtype=recorded[0].dtype)
    y: torch.Tensor = record((_RECORDING, (options, recorded)), *whole)
    return y


def _launch_recorded(call: tuple[GroupOptions, Recorded | None], operands: GroupOperands) -> Launched:
    options, recorded = call
    if recorded is None:
        y, statistics = operator(NAME)(*operands, *options, True)
        recorded = y, None, statistics, is_on()
    y, _, statistics, is_invariant = recorded
    # Backward calls are known by the options, and by which vectors there are.
    args = options, *[vector is None for vector in operands[1:]]
    return y, None, (*operands, statistics), args, is_invariant


def _gradients(call: BackwardPass) -> Gradients:
    if call.by_formula or not arrived_in_memory((call.dy,)):
        return eager.group_gradients(call)
    gradients: Gradients = launched_backward(call)
    return gradients


_RECORDING = Recording(_launch_recorded, _gradients, "group_gradients")


def _record_known(operands: GroupOperands, key_args: KeyArgs, recorded: Recorded) -> torch.Tensor:
    """Record a call that was found and launched."""
    _, num_groups, eps, activation, _ = key_args
    options = GroupOptions(num_groups, eps, applied(activation), recorded[0].dtype)
    y: torch.Tensor = record_at_once((_RECORDING, (options, recorded)), *operands)
    return y


native.record_by("group", _record_known)

_DTYPES = (*FLOATS, torch.float64)
_NAMES = ("x", "weight", "bias", "num_groups", "eps", "activation")


def normalise_known(operands: GroupOperands, key_args: KeyArgs) -> torch.Tensor | None:
    """Return the result of a call like an earlier one; None of another call."""
    known: torch.Tensor | None = None if is_dynamo_compiling() else native.calls.group.normalise(operands, key_args)
    return known


def normalise(operands: GroupOperands, key_args: KeyArgs) -> torch.Tensor:
    """Run a call of the public function, whose options, from num_groups on, are as callers passed them."""
    known = normalise_known(operands, key_args)
    if known is not None:
        return known
    _, num_groups, eps, activation, _ = key_args
    if is_handed_on(operands):
        args = dict(zip(_NAMES, (*operands, *key_args[1:-1]), strict=True))
        y: torch.Tensor = handed_on(NAME, operands, args, positional=5)
        return y
    x, *vectors = operands
    check_tensor("x", x)
    silu = applied(activation)
    if not isinstance(num_groups, (int, torch.SymInt)):
        num_groups = _as_int(num_groups)
    with unrecorded():
        _check(x, num_groups, *vectors)
    options = GroupOptions(num_groups, check_number("eps", eps, least=0.0), silu, result_dtype("group", x))
    if is_sharded(*operands):
        # Each rank normalises its samples, in a call of plain tensors.
        own_args = ("layer", *options[:-1], None)
        whole: torch.Tensor = by_parts(
            NAME, GROUP.inputs, operands, lambda parts: normalise(parts, own_args).contiguous(), x.dim() - 1
        )
        return whole
    if backend(x) != "kernel" or left_to_torch(operands) or 0 in x.shape:
        return eager.group(operands, options)
    # Numbers of other classes are known as what they are converted to.
    return normalise_checked(operands, options, ("layer", num_groups, options.eps, activation, None))


# The num_groups of calls over channels, by the norm's word.
_SPANS = {span.norm.value: span.num_groups for span in Span if not span.is_group}


def normalise_channels(
    operands: Operands, options: Options, dim: int, activation: str | Activation | None, *shape: Any
) -> torch.Tensor:
    """Run a call over the channels of x, (B, C, ...); `shape` is the normalized_shape of norms that take one.

    Channels that are innermost are rows if no activation follows, and so is what kernels do not take. Other channels
    have kernels of their own.
    """
    x, weight, bias, _, x_bias = operands
    norm, eps, weight_offset, _, cast = options
    silu = applied(activation)
    if type(dim) is int and dim == -1:
        raise ConflictError(f"activation is {activation!r}, and dim -1; use dim=1, or leave activation out")
    if type(dim) is not int or dim != 1:
        raise ConflictError(f"dim is {dim!r}; it takes -1, the last dimensions of x, or 1, the channels of (B, C, ...)")
    if x_bias is not None or weight_offset != 0.0 or cast not in (Cast.AFTER_WEIGHT, Cast.AFTER_WEIGHT.value):
        raise ConflictError("x_bias, weight_offset and cast go with dim=-1; leave them out with dim=1")
    is_tensor = isinstance(x, torch.Tensor)
    if is_tensor and x.dim() < 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}; with dim=1 it takes (B, C, ...), at least 2 dimensions")
    (normalized_shape,) = shape or (x.shape[1:2] if is_tensor else (),)
    if isinstance(normalized_shape, Sequence) and len(normalized_shape) > 1:
        raise ShapeError(f"normalized_shape is {tuple(normalized_shape)}; with dim=1 it takes (C,), the channels alone")
    images = (x, weight, bias)
    key_args = ("layer", _SPANS[norm], DEFAULT_EPS if eps is None else eps, activation, None)
    if is_tensor and is_last(normalized_shape, x.shape[1:2]):
        known = normalise_known(images, key_args)
        if known is not None:
            return known
    rows = (x.movedim(1, -1), *operands[1:])
    is_dense = is_tensor and is_served(images, eps) and not is_sharded(*images) and 0 not in x.shape
    is_activated = silu != applied(None)
    if is_dense and x.dim() > 2 and (is_activated or x.stride(1) != 1):
        checked(rows, normalized_shape, options, kernel=True)
        group_options = GroupOptions(key_args[1], float(key_args[2]), silu, result_dtype(norm, x))
        return normalise_checked(images, group_options, (*key_args[:2], group_options.eps, *key_args[3:]))
    if is_activated and is_tensor and x.dtype.itemsize == 2:
        # The norm and the activation share one rounding.
        wide: torch.Tensor = normalise_rows(rows, normalized_shape, (norm, eps, weight_offset, torch.float32, cast))
        return functional.silu(wide).to(result_dtype(norm, x)).movedim(-1, 1)
    y: torch.Tensor = normalise_rows(rows, normalized_shape, options)
    return (functional.silu(y) if is_activated else y).movedim(-1, 1)


def _as_int(number: Any) -> Any:
    """Return the int that a whole number of another class is, NumPy's say, as torch takes it; else the argument."""
    try:
        return index(number)
    except TypeError:
        return number


def _check(x: torch.Tensor, num_groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    check_dtype("x", x, _DTYPES)
    if x.dim() < 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}; it takes (B, C, ...), at least 2 dimensions")
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 1:
        raise ShapeError(f"num_groups is {num_groups!r}; it takes a whole number from 1 that divides the channels")
    channels = x.shape[1]
    if channels % num_groups:
        raise ShapeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of shape "
            f"{list(x.shape)} and num_groups={num_groups}; pass a divisor of {channels}"
        )
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        check_tensor(name, vector)
        if tuple(vector.shape) != (channels,):
            raise ShapeError(f"{name} has shape {tuple(vector.shape)}; it takes ({channels},), the channels of x")
        check_dtype(name, vector, _DTYPES)
        check_device(name, vector, x)
