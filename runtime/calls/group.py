"""Calls of GroupNorm: laid out, launched, and recorded by autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ..codegen.groups import Activation, GroupMode
from ..codegen.values import Direction
from ..dtypes import DTYPES
from ..kernels.gpu import require_device
from ..kernels.key import ALIGNMENT
from ..selection import dispatch
from ..selection.invariance import is_on
from ..upstream.torch_dynamo import eager_only
from . import eager
from .eager import GroupArrived as Arrived
from .eager import GroupNormGradients as Gradients
from .eager import GroupOptions as Options
from .group_plan import GroupPlan, Kind, plan_of
from .known import MISALIGNED, PLAIN, UNREADABLE, Known, Tensors, remember
from .known_backward import Learnt, addresses_of, looked_up_again
from .record import Launched, Recording, arrived_in_memory, record, record_at_once, records
from .traced import dispatch_modes, intercepted, operator

FORWARD_OPERATOR, BACKWARD_OPERATOR = "group_norm", "group_norm_backward"

_Vector = torch.Tensor | None


class Found(NamedTuple):
    """What a call that is known comes to: its plan, what it is told, y's dtype, and whether statistics are saved."""

    plan: GroupPlan
    options: Options
    y_dtype: torch.dtype
    saves: bool


def are_channels_last(x: torch.Tensor) -> bool | None:
    """Whether channels are innermost in memory, or else positions; None of a tensor that is laid out otherwise."""
    if x.dim() == 2:
        return True if x.is_contiguous() else None
    if x.is_contiguous():
        return False
    return True if x.movedim(1, -1).is_contiguous() else None


def laid_out(x: torch.Tensor) -> torch.Tensor:
    """A tensor without gaps whose channels or positions are innermost: the very one, or a copy of its kind."""
    if are_channels_last(x) is not None:
        return x
    if x.dim() > 2 and x.stride(1) == 1 and x.shape[1] > 1:
        return _with_channels(x, last=True)
    return x.contiguous()


def _with_channels(x: torch.Tensor, *, last: bool | None) -> torch.Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last and x.dim() > 2 else x.contiguous()


def _vector(vector: _Vector) -> _Vector:
    """Return a vector that kernels can read: a copy of one that has gaps, or that negates its memory."""
    return None if vector is None else vector.resolve_neg().contiguous()


def _aligned(tensor: _Vector) -> _Vector:
    """A tensor for the kernel that all samples share under batch invariance, of which one may start anywhere."""
    return tensor.clone() if tensor is not None and is_on() and tensor.data_ptr() % ALIGNMENT else tensor


@eager_only
def launched(
    x: torch.Tensor, weight: _Vector, bias: _Vector, options: Options, *, saves: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A checked call of a tensor that is laid out: y, and if it `saves` them a mean and rstd of each group.

    The statistics are one tensor, (2, samples, groups), fp32.
    """
    require_device(x)
    x, weight, bias = x.resolve_neg(), _vector(weight), _vector(bias)
    if not x.numel():
        statistics = x.new_zeros((2, x.shape[0], options.num_groups), dtype=torch.float32) if saves else None
        return torch.empty_like(x, dtype=options.out_dtype or x.dtype), statistics
    whole: Any = map(_aligned, (x, weight, bias))
    x, weight, bias = whole
    return run(_find(x, weight, bias, options, saves), x, weight, bias)


def _find(x: torch.Tensor, weight: _Vector, bias: _Vector, options: Options, saves: bool) -> Found:
    y_dtype = options.out_dtype or x.dtype
    mode = GroupMode(DTYPES[x.dtype], Direction.FORWARD, Activation(options.activation), bool(are_channels_last(x)))
    tensors = {"x": x, "weight": weight, "bias": bias}
    kind = Kind.forward(mode, _size(x, options), _types(tensors), y_dtype, _misaligned(tensors), saves=saves)
    return Found(plan_of(kind, x.device), options, y_dtype, saves)


def run(found: Found, x: torch.Tensor, weight: _Vector, bias: _Vector) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Allocate and launch; see `launched`."""
    plan, options, y_dtype, saves = found
    samples, groups = x.shape[0], options.num_groups
    y = plan.empty(tuple(x.shape), x.stride(), y_dtype)
    size = (2, samples, groups)
    statistics = plan.empty(size, (samples * groups, groups, 1), torch.float32) if saves else None
    plan.launch(plan.layout(samples), (x, weight, bias, y), statistics, (), options.eps)
    return y, statistics


class _Ready(NamedTuple):
    """The launches of a backward call.

    Attributes:
        plan: the kernels.
        wants_dx: whether x has a gradient that is asked for.
        dtypes: those of the gradients of weight and bias that are due, None of one that is not.
    """

    plan: GroupPlan
    wants_dx: bool
    dtypes: tuple[torch.dtype | None, torch.dtype | None]

    def run(self, arrived: Tensors, addresses: Sequence[int], told: Any) -> list[torch.Tensor | None] | None:
        """Launch a call and return the gradients of x, weight and bias; None if there are no samples."""
        dy, _, x, weight, bias, statistics = arrived
        plan, wants_dx, dtypes = self
        if x is None or x.shape[0] == 0:
            return None
        empty, channels = plan.empty, x.shape[1]
        layout = plan.layout(x.shape[0])
        dx = empty(tuple(x.shape), x.stride(), x.dtype)
        size, strides = (layout.sums, channels), (channels, 1)
        partials = [None if dtype is None else empty(size, strides, torch.float32) for dtype in dtypes]
        shifts = bias if plan.kind.mode.activation.is_applied else None
        plan.launch(layout, (dy, x, weight, shifts), statistics, (dx, *partials), 0.0)
        found = [None if dtype is None else empty((channels,), (1,), dtype) for dtype in dtypes]
        if dtypes != (None, None):
            plan.finish(layout.sums, partials, found)
        return [dx if wants_dx else None, *found]


@eager_only
def launched_backward(arrived: Arrived, due: Sequence[bool] = (), learnt: Learnt | None = None) -> Gradients:
    """The gradients that are wanted, by kernels; dy is copied where it does not lie as x does.

    Args:
        arrived: the call.
        due: which operands have a gradient that is asked for, as a look-up was told it.
        learnt: the key and tensors of a look-up, by which calls like this one become known; None has them stay unknown.
    """
    dy, x, weight, bias, statistics, options, wants = arrived
    require_device(x)
    plans = dispatch.plans
    x, weight, bias = x.resolve_neg(), _vector(weight), _vector(bias)
    dy = _with_channels(dy, last=are_channels_last(x)).resolve_neg()
    whole: Any = map(_aligned, (dy, x, weight, bias))
    dy, x, weight, bias = whole
    learnt, known = looked_up_again("group", learnt, _told_backward(options, weight, bias), due, dy, None)
    if known is not None:
        return Gradients(*known)
    vectors = {"dweight": weight, "dbias": bias}
    summed = {name: vector for name, vector in vectors.items() if vector is not None and name in wants}
    if not x.numel():
        zeros = {name: torch.zeros_like(vector) for name, vector in summed.items()}
        return Gradients(torch.empty_like(x) if "dx" in wants else None, zeros.get("dweight"), zeros.get("dbias"))
    mode = GroupMode(DTYPES[x.dtype], Direction.BACKWARD, Activation(options.activation), bool(are_channels_last(x)))
    tensors = {"dy": dy, "x": x, "weight": weight, "bias": bias}
    kind = Kind.backward(mode, _size(x, options), _types(tensors), summed, _misaligned(tensors))
    dtypes = [None if name not in summed else summed[name].dtype for name in vectors]
    ready = _Ready(plan_of(kind, x.device), "dx" in wants, (dtypes[0], dtypes[1]))
    launched = (dy, None, x, weight, bias, statistics)
    addresses = addresses_of(launched)
    found = ready.run(launched, addresses, options)
    assert found is not None
    if learnt is not None:
        key, own = learnt
        # Kernels read no copies, and all that a guard can hold.
        if addresses == addresses_of(own) and all(each is None or each.__class__ in PLAIN for each in own):
            remember(plans, key, own, (1, 0, 1, 0, 0, 2), tuple(addresses), ready)
    return Gradients(*found)


def _size(x: torch.Tensor, options: Options) -> tuple[int, int, int]:
    """Channels, groups and positions."""
    return x.shape[1], options.num_groups, x.numel() // (x.shape[0] * x.shape[1])


def _types(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.dtype | None]:
    return {name: None if tensor is None else tensor.dtype for name, tensor in tensors.items()}


def _misaligned(tensors: Mapping[str, torch.Tensor | None]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor is not None and tensor.data_ptr() % ALIGNMENT]


def _key(x: torch.Tensor, weight: _Vector, bias: _Vector, told: tuple[int, float, object]) -> tuple[Any, ...]:
    there = weight is None, bias is None, torch.is_grad_enabled()
    return ("group", *told, *there, *x.shape[1:])


def normalise_known(
    x: torch.Tensor, weight: _Vector, bias: _Vector, told: tuple[int, float, object]
) -> torch.Tensor | None:
    """What `normalise` returns of arguments like those of a call before; None where there was none.

    Args:
        x: as the call was passed it, like the others.
        weight: likewise.
        bias: likewise.
        told: num_groups, eps and activation, likewise.
    """
    num_groups, eps, _ = told
    # Others may be equal to what was checked, and be refused themselves: 2.0, or True.
    if num_groups.__class__ is not int or eps.__class__ is not float:
        return None
    found = _look_up(x, weight, bias, told)
    return None if found is None else _ran(found, x, weight, bias, record_at_once)


def _look_up(x: torch.Tensor, weight: _Vector, bias: _Vector, told: tuple[int, float, object]) -> Found | None:
    """Return what a call comes to that is like one before, None if there was none."""
    # Neither is part of what a kind of call is like: make_fx, say, and forward-mode AD.
    if dispatch_modes() or forward_ad._current_level >= 0:
        return None
    tensors = (x, weight, bias)
    try:
        kinds: tuple[Known, ...] = dispatch.plans.get(_key(x, weight, bias, told), ())
    except UNREADABLE:
        return None
    for kind in kinds:
        if kind.fits(*kind.present(tensors)):
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            if x.shape[0] == 0 or (addresses[0] | addresses[1] | addresses[2]) & MISALIGNED:
                return None
            found: Found | None = kind.plan
            return found
    return None


def _ran(found: Found, x: torch.Tensor, weight: _Vector, bias: _Vector, function: Any) -> torch.Tensor:
    if found.saves:
        recorded: torch.Tensor = function((_RECORDING, found), x, weight, bias)
        return recorded
    return run(found, x, weight, bias)[0]


def normalise(
    x: torch.Tensor, weight: _Vector, bias: _Vector, options: Options, told: tuple[int, float, object] | None = None
) -> torch.Tensor:
    """Run a checked call by kernels, recorded where a gradient is due, and known from then on by what it was `told`.

    Where somebody sees operators it is one, and what is kept for the backward pass is the same.
    """
    whole: Any = map(_aligned, (laid_out(x).resolve_neg(), _vector(weight), _vector(bias)))
    x, weight, bias = whole
    saves = records((x, weight, bias))
    if intercepted(x, weight, bias):
        seen: torch.Tensor = (
            record((_RECORDING, options), x, weight, bias) if saves else normalise_traced(x, weight, bias, options)
        )
        return seen
    # Copies may be like the tensors of a call before.
    found = None if told is None else _look_up(x, weight, bias, told)
    if found is None:
        found = _find(x, weight, bias, options, saves)
        tensors = (x, weight, bias)
        if told is not None and all(each is None or each.__class__ in PLAIN for each in tensors):
            addresses = tuple([0 if each is None else each.data_ptr() for each in tensors])
            _remember(_key(x, weight, bias, told), tensors, addresses, found)
    return _ran(found, x, weight, bias, record)


@eager_only
def _remember(key: tuple[Any, ...], tensors: Tensors, addresses: tuple[int, ...], found: Found) -> None:
    # How many samples there are is no part of a plan.
    free = [0 if each is None or each.dim() < 2 else 1 for each in tensors]
    remember(dispatch.plans, key, tensors, free, addresses, found)


def normalise_traced(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, options: Options
) -> torch.Tensor:
    """The same as one operator, and the copy before it."""
    saves = records((x, weight, bias))
    found: list[torch.Tensor] = operator(FORWARD_OPERATOR)(laid_out(x), weight, bias, *options, saves)
    return found[0]


def operated_backward(arrived: Arrived) -> Gradients:
    """The gradients that are wanted, as one operator."""
    dy, x, weight, bias, statistics, options, wants = arrived
    vectors = {"dweight": weight, "dbias": bias}
    asked = [name for name in wants if name == "dx" or vectors[name] is not None]
    num_groups, eps, activation, _ = options
    told = (num_groups, eps, activation, asked)
    found = dict(zip(asked, operator(BACKWARD_OPERATOR)(dy, x, weight, bias, statistics, *told), strict=True))
    return Gradients(*[found.get(name) for name in Gradients._fields])


def _told_backward(options: Options, weight: _Vector, bias: _Vector) -> tuple[Options, bool, bool]:
    """Return what backward calls are known by besides their tensors: the options, and which vectors there are."""
    return options, weight is None, bias is None


def _launch_recorded(call: Found | Options, operands: tuple[torch.Tensor, _Vector, _Vector]) -> Launched:
    if isinstance(call, Found):
        y, statistics = run(call, *operands)
        options, is_invariant = call.options, call.plan.entry.is_invariant
    else:
        y, statistics = operator(FORWARD_OPERATOR)(*operands, *call, True)
        options, is_invariant = call, is_on()
    return y, None, (*operands, statistics), _told_backward(options, *operands[1:]), is_invariant


def _gradients(
    saved: Any,
    args: tuple[Options, bool, bool],
    dy: torch.Tensor,
    _: None,
    due: tuple[bool, ...],
    by_formula: bool,
    learnt: Learnt | None,
) -> Sequence[torch.Tensor | None]:
    x, weight, bias, statistics = saved
    arrived = Arrived(dy, x, weight, bias, statistics, args[0], list(compress(Gradients._fields, due)))
    if by_formula or not arrived_in_memory((dy,)):
        return eager.group_gradients(arrived)
    return launched_backward(arrived, due, learnt)


_RECORDING = Recording(_launch_recorded, _gradients, "group")
